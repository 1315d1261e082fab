"""Feed-forward nets, residual forms and products, against autograd on whole layers."""

import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.norms import layer_norm_gain, rms_norm_gain
from equipoise.theory.activations import ACTIVATIONS, activation_named
from equipoise.theory.lipschitz.bound import Bound, combined
from equipoise_lab.theory.lipschitz.joint import dual_bound
from equipoise_lab.theory.lipschitz.layers import (
    deep_norm,
    end_to_end,
    feedforward_bound,
    feedforward_local,
    gated_local,
    norm_global,
    norm_local,
    parallel,
    post_norm,
    pre_norm,
    sandwich,
)
from tests.conftest import FLOATS
from tests.oracles import lipschitz as oracle
from tests.theory.lipschitz_cases import plain

seeds = st.integers(0, 2**32 - 1)


def normal(seed: int, *shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_no_slope_exceeds_its_constant_and_some_slope_reaches_it(name: str) -> None:
    function, steepest = activation_named(name)
    z = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
    # At the kink itself torch takes either side, as the CPU has it: look before it.
    before = torch.tensor(3.0, dtype=z.dtype).nextafter(torch.zeros((), dtype=z.dtype))
    z = torch.cat([z, before[None]]).requires_grad_()
    (slope,) = torch.autograd.grad(function(z).sum(), z)
    found = float(slope.abs().max())
    if math.isinf(steepest):
        assert found == pytest.approx(60.0)  # 2z: grows with the window
    else:
        assert found <= steepest and found == pytest.approx(steepest, rel=1e-8)


def test_an_unknown_activation_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="known: elu, gelu, gelu_tanh"):
        activation_named("swish9")


@settings(max_examples=25)
@given(seeds, st.sampled_from(["relu", "gelu", "silu", "tanh"]))
def test_feedforward_local_is_the_jacobians_norm(seed: int, name: str) -> None:
    x, w_in, w_out = normal(seed, 3, 4), normal(seed + 1, 4, 6), normal(seed + 2, 6, 4)
    b = normal(seed + 3, 6)
    function, _ = activation_named(name)
    J = oracle.jacobian(lambda x: function(x @ w_in + b) @ w_out, x)
    truth = float(oracle.block_norms(J).max())
    local = feedforward_local(x, w_in, w_out, activation=name, b_in_M=b).value
    assert truth <= local * (1 + 1e-9) and local <= truth * 4 ** (1 / 512) * (1 + 1e-9)
    assert local <= feedforward_bound(w_in, w_out, activation=name).value * 1.01


@settings(max_examples=25)
@given(seeds)
def test_gated_local_is_the_jacobians_norm(seed: int) -> None:
    x, gate, up = normal(seed, 3, 4), normal(seed + 1, 4, 6), normal(seed + 2, 4, 6)
    down = normal(seed + 3, 6, 4)
    J = oracle.jacobian(lambda x: (F.silu(x @ gate) * (x @ up)) @ down, x)
    truth = float(oracle.block_norms(J).max())
    local = gated_local(x, gate, up, w_down_MD=down)
    assert truth <= local.value * (1 + 1e-9)
    assert local.value <= truth * 4 ** (1 / 512) * (1 + 1e-9)
    assert local.scope == "local"


def test_one_is_not_gelus_constant() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    x, y = torch.tensor([[1.40]]).double(), torch.tensor([[1.43]]).double()
    change = float((F.gelu(y) - F.gelu(x)).abs() / (y - x).abs())
    assert 1.0 < change <= feedforward_bound(one, one, activation="gelu").value


@pytest.mark.parametrize("dtype", FLOATS)
def test_feedforward_in_any_precision(dtype: torch.dtype) -> None:
    x, w_in, w_out = (normal(7, *s).to(dtype) for s in [(3, 4), (4, 6), (6, 4)])
    exact = (x.double(), w_in.double(), w_out.double())
    found = feedforward_local(x, w_in, w_out, activation="gelu").value
    truth = feedforward_local(*exact, activation="gelu").value
    assert found == pytest.approx(truth, rel=1e-5)
    assert feedforward_bound(w_in, w_out, activation="relu").value == pytest.approx(
        feedforward_bound(*exact[1:], activation="relu").value, rel=1e-5
    )


def test_a_broken_token_reads_nan() -> None:
    x, w_in, w_out = normal(7, 3, 4), normal(8, 4, 6), normal(9, 6, 4)
    x[1, 1] = math.nan
    assert math.isnan(feedforward_local(x, w_in, w_out, activation="gelu").value)
    assert math.isnan(gated_local(x, w_in, w_in, w_down_MD=w_out).value)
    assert math.isnan(feedforward_bound(w_in * x[1, 1], w_out, activation="relu").value)


def test_no_grad_does_not_matter() -> None:
    x, w_in, w_out = normal(7, 3, 4), normal(8, 4, 6), normal(9, 6, 4)
    outside = feedforward_local(x, w_in, w_out, activation="gelu")
    with torch.inference_mode():
        assert feedforward_local(x, w_in, w_out, activation="gelu") == outside


GAMMA = torch.tensor([1.0, -2.0, 0.5, 1.5, 1.0, 0.8, 1.2, 0.3], dtype=torch.float64)


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (8,), GAMMA, None, 0.01)


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (8,), GAMMA, 0.01)


NORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., object]]] = {
    "layer": (layer_norm, layer_norm_gain),
    "rms": (rms_norm, rms_norm_gain),
}


def true_constant(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    return oracle.block_inf_lower(oracle.jacobian(f, x))


@pytest.mark.parametrize("which", sorted(NORMS))
@pytest.mark.parametrize("seed", range(4))
def test_residual_forms_hold_on_real_layers(which: str, seed: int) -> None:
    case = plain(seed, gain=0.7)
    norm, gain = NORMS[which]
    f, x = oracle.attention(case.heads), case.x

    def at(u: Tensor) -> Bound:
        return norm_local(gain(u, GAMMA, eps=0.01))

    inner, here = dual_bound(case.heads, norm(x)), dual_bound(case.heads, x)
    forms = [
        (lambda u: u + f(norm(u)), pre_norm(inner, norm=at(x))),
        (lambda u: u - 2 * f(norm(u)), pre_norm(inner, norm=at(x), multiplier=-2)),
        (lambda u: norm(u + f(u)), post_norm(here, norm=at(x + f(x)))),
        (
            lambda u: norm(u + 0.5 * f(u)),
            post_norm(here, norm=at(x + 0.5 * f(x)), multiplier=0.5),
        ),
        (lambda u: norm(3 * u + f(u)), deep_norm(here, norm=at(3 * x + f(x)), alpha=3)),
        (
            lambda u: u + norm(f(norm(u))),
            sandwich(inner, inner=at(x), outer=at(f(norm(x)))),
        ),
        (
            lambda u: u + f(norm(u)) + f(norm(u)),
            parallel([inner, inner], norm=at(x)),
        ),
    ]
    for layer, bound in forms:
        truth = true_constant(layer, x)
        assert truth <= bound.value <= 20 * truth, bound.note
        assert (bound.scope, bound.kind) == ("local", "first order")


def test_a_stack_is_bounded_by_its_product() -> None:
    case = plain(1, gain=0.7)
    f, x = oracle.attention(case.heads), case.x
    parts = []
    for _ in range(3):
        norm = norm_local(layer_norm_gain(x, GAMMA, eps=0.01))
        parts.append(pre_norm(dual_bound(case.heads, layer_norm(x)), norm=norm))
        x = x + f(layer_norm(x))

    def stack(u: Tensor) -> Tensor:
        for _ in range(3):
            u = u + f(layer_norm(u))
        return u

    log, product = end_to_end(parts)
    assert true_constant(stack, case.x) <= product.value
    assert log == pytest.approx(math.log(product.value))


def test_global_norms_are_global_and_large() -> None:
    found = norm_global(GAMMA, eps=1e-5)
    assert found.value == pytest.approx(2 / math.sqrt(1e-5)) and found.scope == "global"


def test_a_product_that_overflows_keeps_its_logarithm() -> None:
    layer = Bound(value=1e200, scope="global", kind="certified")
    log, product = end_to_end([layer] * 2)
    assert product.value == math.inf and log == pytest.approx(400 * math.log(10))
    silent = Bound(value=0.0, scope="global", kind="certified")
    assert end_to_end([layer, silent])[1].value == 0.0
    endless = Bound(value=math.inf, scope="global", kind="certified")
    assert math.isnan(end_to_end([endless, silent])[1].value)
    with pytest.raises(InputError, match="at least one sublayer"):
        end_to_end([])


def test_a_combination_claims_no_more_than_its_weakest_part() -> None:
    strong = Bound(value=1.0, scope="global", kind="certified")
    ball = Bound(value=1.0, scope="ball", kind="certified")
    sample = Bound(value=1.0, scope="local", kind="estimate")
    assert combined(1.0, [strong, ball]).scope == "ball"
    assert combined(1.0, [ball, sample]).kind == "estimate"
    other = Bound(value=1.0, scope="global", kind="certified", norm="frobenius")
    with pytest.raises(InputError, match="different norms"):
        combined(1.0, [strong, other])
