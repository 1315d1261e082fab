"""Norms, invariances and known points of curvature; dtypes and broken inputs."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from equipoise.errors import InputError
from equipoise.theory.activations import (
    CURVED,
    activation_named,
    derivatives,
)
from equipoise.theory.curvature.norm import (
    norm_curvature,
    norm_curvature_bound,
    norm_curvature_unfolded,
    norm_hessian,
    norm_product,
)
from equipoise.theory.curvature.softmax import (
    UNFOLDED_SUPREMUM,
    cross_entropy_hessian,
    softmax_curvature_bound,
    softmax_hessian,
    softmax_product,
)
from equipoise.theory.lipschitz.heads import Heads
from equipoise.theory.softmax_norms import softmax_jacobian_norm
from equipoise_lab.theory.curvature.attention import Weights, attention_weights_product
from equipoise_lab.theory.curvature.attention_blocks import attention_hessian
from equipoise_lab.theory.curvature.feedforward import (
    FeedForwardCurvature,
    feedforward_hessian,
    feedforward_norms,
)
from lab.tests.theory.curvature_draws import Draw
from tests.conftest import FLOATS, error_budget

seeds = st.integers(0, 2**31)
floors = st.sampled_from([0.0, 1e-5, 0.3, 1.0, 30.0])


def two(matrix: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, ord=2))


@given(seeds, st.integers(1, 8), floors, st.booleans())
def test_norm_curvature_is_the_spectral_norm(
    seed: int, width: int, eps: float, centred: bool
) -> None:
    draw, width = Draw(seed), width + centred
    x, g, gain = (draw.normal(2, width), draw.normal(2, width), draw.normal(width))
    given = {"eps": eps, "gain_D": gain, "centred": centred}
    truth = torch.linalg.matrix_norm(norm_hessian(x, g, **given).x_x_xDE, ord=2)
    found = norm_curvature(x, g, **given)
    # Where the truth is zero (two centred channels at ε = 0) only rounding is left.
    floor = 1e-14 * float(gain.abs().max() * g.abs().max())
    scale = x.var(-1, correction=0) if centred else x.square().mean(-1)
    slack = 1e-10 * truth + floor / (scale + eps)
    assert ((found - truth).abs() <= slack).all()
    assert (found <= norm_curvature_bound(x, g, **given) + slack).all()


@given(seeds, st.integers(1, 6), floors, st.booleans())
def test_unfolded_norm_is_that_of_all_outputs(
    seed: int, width: int, eps: float, centred: bool
) -> None:
    width += 2 * centred
    x = Draw(seed).normal(width)
    eye = torch.eye(width, dtype=torch.float64)
    blocks = norm_hessian(x.expand(width, -1), eye, eps=eps, centred=centred).x_x_xDE
    found = norm_curvature_unfolded(x, eps=eps, centred=centred)
    assert float(found) == pytest.approx(two(blocks.flatten(0, 1)), rel=1e-9, abs=1e-12)


def test_the_tight_bound_is_attained() -> None:
    x = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    along, across = x / 2, torch.tensor([1.0, 1.0, -1.0, -1.0]).double() / 2
    g = along * math.sqrt(1 / 3) + across * math.sqrt(2 / 3)
    bound = norm_curvature_bound(x, g, eps=0.0)
    assert float(norm_curvature(x, g, eps=0.0)) == pytest.approx(
        float(bound), rel=1e-12
    )


@given(seeds)
def test_invariances_of_layer_norm(seed: int) -> None:
    draw = Draw(seed)
    x, g = draw.normal(5), draw.normal(5)
    ones, m = torch.ones(5).double(), x - x.mean()
    slope = torch.func.grad(lambda y: (g * (y - y.mean()) / y.std(correction=0)).sum())(
        x
    )
    size = 1e-9 * (1 + float(slope.norm()) / float(m.norm()))
    assert norm_product(x, g, ones, eps=0.0).x_xD.abs().max() < size
    # LayerNorm is of degree 0, so its gradient is of degree −1 (Euler).
    assert (norm_product(x, g, m, eps=0.0).x_xD + slope).abs().max() < size


@given(seeds, st.integers(2, 8))
def test_softmax_curvature_lies_between_multiples_of_its_jacobian(
    seed: int, K: int
) -> None:
    draw = Draw(seed)
    a, e, u, v = draw.normal(K).softmax(-1), *(draw.normal(K) for _ in range(3))
    jacobian = torch.diag(a) - torch.outer(a, a)
    bent, mean = softmax_hessian(a, e), (a * e).sum()
    reach = (e - mean).abs().max()
    for sign in (1, -1):
        assert torch.linalg.eigvalsh(reach * jacobian + sign * bent)[0] > -1e-12
    moment = (a * (e - mean) * (u - (a * u).sum()) * (v - (a * v).sum())).sum()
    assert float(u @ softmax_product(a, e, v)) == pytest.approx(
        float(moment), abs=1e-12
    )
    assert two(bent) <= float(softmax_curvature_bound(a, e)) * (1 + 1e-9) + 1e-15


@given(seeds, st.integers(2, 6))
def test_no_softmax_row_bends_more_than_the_supremum(seed: int, K: int) -> None:
    a = (3 * Draw(seed).normal(K)).softmax(-1)
    eye = torch.eye(K).double()
    assert two(torch.cat([softmax_hessian(a, e) for e in eye])) <= UNFOLDED_SUPREMUM


@pytest.mark.parametrize("name", CURVED)
def test_largest_slope_of_activations(name: str) -> None:
    z = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    steepest, limit = derivatives(name, z).first.abs().max(), activation_named(name)[1]
    assert limit - 1e-6 < float(steepest) <= limit + 1e-12


def test_norms_of_a_feed_forward_net_are_those_of_its_worst_unit() -> None:
    draw = Draw(0)
    x, g = draw.normal(4, 3), draw.normal(4, 2)
    net = FeedForwardCurvature(w_in_DM=draw.normal(3, 5), w_out_MO=draw.normal(5, 2))
    dense = feedforward_hessian(net, x, g).dense()
    found, n = feedforward_norms(net, x, g), x.numel()
    assert found["in_in"] == pytest.approx(two(dense[n : n + 15, n : n + 15]))
    assert found["in_out"] == pytest.approx(two(dense[n : n + 15, n + 15 :]))
    assert found["in_out"] <= activation_named("gelu")[1] * two(x) * two(g)


def test_cross_entropy_bends_by_at_most_half_its_weight() -> None:
    z, weight = Draw(0).normal(3, 5), torch.tensor([0.5, 0.5, 0.0]).double()
    found = torch.linalg.matrix_norm(cross_entropy_hessian(z, weight_x=weight), ord=2)
    exact = weight * softmax_jacobian_norm(z.softmax(-1))
    assert torch.allclose(found, exact, rtol=1e-9) and (found <= weight / 2).all()


def test_a_key_bias_is_flat() -> None:
    draw = Draw(3)
    x = torch.cat([draw.normal(5, 3), torch.ones(5, 1).double()], 1)
    q, k, v = (draw.normal(1, 4, 2) for _ in range(3))
    heads = Heads(w_q_HDE=q, w_k_GDE=k, w_v_GDF=v, w_o_HFD=draw.normal(1, 2, 4))
    g = draw.normal(5, 4)
    zero = Weights(*(torch.zeros_like(w) for w in heads.weights))
    moved = torch.zeros_like(k)
    moved[:, 3] = draw.normal(2)  # the row of W_K that multiplies the constant channel
    found = attention_weights_product(heads, x, g, zero._replace(k_GDE=moved))
    # Softmax does not see what is added to all its scores.
    assert max(float(part.abs().max()) for part in found) < 1e-12


@pytest.mark.parametrize("dtype", FLOATS)
def test_narrow_inputs_are_read_at_least_in_single(dtype: torch.dtype) -> None:
    draw = Draw(1)
    x, g, d = (draw.normal(3, 6).to(dtype) for _ in range(3))
    found = norm_product(x, g, d, eps=1e-5).x_xD
    truth = norm_product(x.double(), g.double(), d.double(), eps=1e-5).x_xD
    wide = torch.promote_types(dtype, torch.float32)
    assert found.dtype == wide
    # Some 60 operations on numbers of size at most 30.
    assert (found - truth).abs().max() < 30 * error_budget(wide, ops=60)
    q, k, v = (draw.normal(2, 6, 3).to(dtype) for _ in range(3))
    heads = Heads(w_q_HDE=q, w_k_GDE=k, w_v_GDF=v, w_o_HFD=v.mT)
    assert attention_hessian(heads, x, g).kk_DEDE[0].dtype == wide


def test_nan_in_nan_out() -> None:
    x, g = torch.ones(2, 4).double(), torch.ones(2, 4).double()
    x = x * torch.arange(4)
    x[0, 1] = math.nan
    found = norm_curvature(x, g, eps=1e-5)
    assert found[0].isnan() and found[1].isfinite()
    one = torch.ones(1, 4, 2).double()
    heads = Heads(w_q_HDE=one, w_k_GDE=one, w_v_GDF=one, w_o_HFD=one.mT)
    assert attention_hessian(heads, x, g).qq_DEDE[0].isnan().any()


def test_invalid_inputs_raise() -> None:
    x = torch.ones(1, 2)
    with pytest.raises(InputError, match="negative"):
        norm_curvature(x, x, eps=-1.0)
    with pytest.raises(InputError, match="no second derivative of 'mish'"):
        derivatives("mish", x)
    with pytest.raises(InputError, match="W_in"):
        FeedForwardCurvature(w_in_DM=x, w_out_MO=torch.ones(3, 1))
    one = torch.ones(1, 2, 2)
    capped = Heads(w_q_HDE=one, w_k_GDE=one, w_v_GDF=one, w_o_HFD=one, softcap=3.0)
    with pytest.raises(InputError, match="softcap"):
        attention_hessian(capped, torch.ones(3, 2), torch.ones(3, 2))
