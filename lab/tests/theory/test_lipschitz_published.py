"""The published bounds hold where they claim to, and refuse what they do not cover."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from equipoise.errors import InputError
from equipoise_lab.theory.lipschitz.published import (
    castin_bound,
    emadi_ball,
    emadi_local,
    g1,
    kim_dot_product,
    kim_l2_attention,
    yudin_local,
)
from tests.oracles import lipschitz as oracle
from tests.theory.lipschitz_cases import MASKS, NORMS, ROTATIONS, Case, cases, plain


def radius(x: torch.Tensor) -> float:
    return float(x.norm(dim=-1).max())


def unnormed(case: Case) -> Case:
    return replace(case, heads=replace(case.heads, q_norm=None, k_norm=None))


@settings(max_examples=30)
@given(cases())
def test_they_hold_on_every_layer_they_cover(case: Case) -> None:
    case = unnormed(case)
    J = oracle.jacobian(oracle.attention(case.heads, case.mask), case.x)
    ball = emadi_ball(case.heads, radius=radius(case.x))
    local = emadi_local(case.heads, case.x, mask=case.mask)
    assert oracle.block_inf_lower(J) <= local.value <= ball.value * (1 + 1e-6)
    whole = oracle.frobenius(J)
    assert whole <= castin_bound(case.heads, radius=radius(case.x), tokens=5).value
    if case.heads.rotary is None:
        assert whole <= yudin_local(case.heads, case.x, mask=case.mask).value


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 10.0]))
def test_g1_bounds_the_softmax_jacobian(seed: int, sharpness: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    z = sharpness * torch.randn(7, generator=rng, dtype=torch.float64)
    J = torch.func.jacrev(lambda z: torch.softmax(z, -1))(z)
    norm = torch.linalg.matrix_norm(J, ord=2)
    assert norm <= g1(torch.softmax(z, -1)) + 1e-15


def test_a_lone_key_cannot_be_moved() -> None:
    assert g1(torch.ones(3, 1)).tolist() == [0.0, 0.0, 0.0]


def test_claims_are_stated() -> None:
    case = plain()
    assert emadi_local(case.heads, case.x).kind == "first order"
    assert emadi_ball(case.heads, radius=2.0).scope == "ball"
    assert castin_bound(case.heads, radius=2.0, tokens=3).norm == "frobenius"
    assert yudin_local(case.heads, case.x).scope == "local"


def test_castin_bounds_finite_changes_inside_the_ball() -> None:
    case = plain(1, gain=2.0)
    f = oracle.attention(case.heads)
    bound = castin_bound(case.heads, radius=2.0, tokens=5)
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        pair = torch.randn(2, 5, 8, generator=rng, dtype=torch.float64)
        x, y = 2.0 * torch.nn.functional.normalize(pair, dim=-1)
        assert (f(x) - f(y)).norm() <= bound.value * (x - y).norm()


def test_dot_product_attention_has_no_constant() -> None:
    """Kim's construction: one token at zero, the others far apart."""
    case = plain(2, H=1)
    x = case.x.clone()
    x[0] = 0
    f = oracle.attention(case.heads)
    small, large = (oracle.frobenius(oracle.jacobian(f, s * x)) for s in (10.0, 100.0))
    assert large > 50 * small  # ∝ s², and no bound of that grows with s is global
    assert kim_dot_product().value == math.inf


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 10.0]))
def test_kims_bound_of_l2_attention_holds(seed: int, gain: float) -> None:
    case = plain(seed, gain=gain, D=4, E=2)
    w_q, _, w_v, w_o = case.heads.weights
    J = oracle.jacobian(oracle.l2_attention(w_q, w_v, w_o), case.x)
    bound = kim_l2_attention(w_q, w_v, w_o, tokens=5)
    assert oracle.frobenius(J) <= bound.value and bound.scope == "global"


def test_the_transcribed_power_of_kims_bound_is_too_low() -> None:
    """One token, W_Q = 10: y = 100·x; with ‖W_Q‖² under the root the bound is 10."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    ten = 10 * one
    J = oracle.jacobian(oracle.l2_attention(ten, one, one), torch.ones(1, 1))
    transcribed = math.sqrt(10.0**2 * 1.0**2)
    assert oracle.frobenius(J) == pytest.approx(100.0)
    assert transcribed < 100.0
    assert kim_l2_attention(ten, one, one, tokens=1).value == pytest.approx(100.0)


def test_the_size_of_kims_bound_grows_like_log_n() -> None:
    one = torch.ones(1, 1, 1)
    values = [kim_l2_attention(one, one, one, tokens=n).value for n in (2, 100)]
    roots = [(v / math.sqrt(n) - 1) / 4 for v, n in zip(values, (2, 100), strict=True)]
    assert [r * math.exp(r + 1) for r in roots] == pytest.approx([1.0, 99.0])


@pytest.mark.parametrize("where", ["q_norm", "k_norm"])
def test_qk_norm_is_refused(where: str) -> None:
    case = plain()
    heads = replace(case.heads, **{where: NORMS["rms"]})
    with pytest.raises(InputError, match="Emadi is not stated for QK-norm"):
        emadi_local(heads, case.x)
    with pytest.raises(InputError, match="Emadi is not stated for QK-norm"):
        emadi_ball(heads, radius=1.0)
    with pytest.raises(InputError, match="Castin"):
        castin_bound(heads, radius=1.0, tokens=2)
    with pytest.raises(InputError, match="Yudin"):
        yudin_local(heads, case.x)


def test_rotations_are_refused_where_the_proof_breaks() -> None:
    case = plain()
    heads = replace(case.heads, rotary=ROTATIONS["halves"])
    with pytest.raises(InputError, match="rotary positions"):
        yudin_local(heads, case.x)


def test_zero_tokens_raise() -> None:
    one = torch.ones(1, 1, 1)
    with pytest.raises(InputError, match="at least one token"):
        kim_l2_attention(one, one, one, tokens=0)


def test_a_fully_masked_query_counts_for_nothing() -> None:
    case = plain(3)
    found = emadi_local(case.heads, case.x, mask=MASKS["blind"])
    assert math.isfinite(found.value)


@pytest.mark.parametrize("bound", [emadi_local, yudin_local])
def test_a_broken_token_reads_nan(bound) -> None:
    case = plain(4)
    assert math.isnan(bound(case.heads, case.x * math.nan).value)
