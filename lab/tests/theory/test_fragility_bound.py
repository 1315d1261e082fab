"""The certified bound is never exceeded, whatever is thrown at it."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.formats import FORMATS
from equipoise_lab.theory.fragility_bounds import head_bound
from tests.numerics.fragility_heads import adversarial, heads
from tests.oracles import fragility as oracle

NARROW = ["fp16", "bf16", "e4m3", "e5m2"]


@pytest.mark.parametrize("name", NARROW)
def test_holds_for_random_heads(name: str) -> None:
    for head in heads(60, seed=1):
        bound = head_bound(
            head.qkv, head.w, format=FORMATS[name], visible_QK=head.visible
        )
        seen = oracle.measured_head_error(
            head.parts, FORMATS[name], visible=head.visible
        )
        assert seen <= bound.relative
        assert bound.in_range or bound.relative == math.inf


@pytest.mark.parametrize("name", NARROW)
def test_holds_for_adversarial_heads(name: str) -> None:
    for head in adversarial(48, seed=2):
        bound = head_bound(head.qkv, head.w, format=FORMATS[name]).relative
        assert oracle.measured_head_error(head.parts, FORMATS[name]) <= bound, head.kind


def hadamard(n: int) -> Tensor:
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    m = two
    while m.shape[0] < n:
        m = torch.kron(m, two)
    return m


@pytest.mark.parametrize("name", NARROW)
def test_holds_where_the_spectral_form_fails(name: str) -> None:
    # Element-wise rounding of V is not bounded by u‖V‖₂: signs of a Hadamard matrix.
    fmt = FORMATS[name]
    v = 1 + fmt.unit_roundoff * 0.999 * hadamard(64)
    q, k = torch.zeros_like(v), torch.ones_like(v)
    w = torch.eye(64, dtype=torch.float64)
    bound = head_bound((q, k, v), w, format=fmt).relative
    assert oracle.measured_head_error((q, k, v, w), fmt) <= bound


@given(st.integers(0, 2**32 - 1), st.sampled_from(NARROW), st.floats(-3, 9))
@settings(max_examples=60)
def test_holds_for_large_scores(seed: int, name: str, power: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 6, 8, generator=rng, dtype=torch.float64)
    w = torch.randn(8, 5, generator=rng, dtype=torch.float64)
    parts = (q * 2**power, k, v, w)
    bound = head_bound(parts[:3], w, format=FORMATS[name]).relative
    seen = oracle.measured_head_error(parts, FORMATS[name])
    assert not seen > bound


def test_two_near_tied_scores_of_two_thousand() -> None:
    # bf16 stores 2056 and 2044 a whole 16 apart: any local Jacobian is useless there.
    q = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    k = torch.tensor([[2056.0, 0.0], [2044.0, 0.0]], dtype=torch.float64) * 2**0.5
    v = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, 2)
    w = torch.eye(2, dtype=torch.float64)
    bound = head_bound((q, k, v), w, format=FORMATS["bf16"]).relative
    assert oracle.measured_head_error((q, k, v, w), FORMATS["bf16"]) <= bound


def test_overflow_leaves_no_bound() -> None:
    x = torch.full((2, 2), 600.0, dtype=torch.float64)
    found = head_bound((x, x, x), x, format=FORMATS["fp16"])
    assert not found.in_range
    assert found.relative == math.inf


def test_broken_input() -> None:
    x = torch.ones(2, 2, dtype=torch.float64)
    bad = x * math.nan
    assert head_bound((bad, x, x), x, format=FORMATS["fp16"]).relative.isnan()
    with pytest.raises(InputError, match="float64 only"):
        head_bound((x.float(), x, x), x, format=FORMATS["fp16"])


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_known_points_to_first_order(name: str) -> None:
    """Loose as it is, no term may go missing: two heads worked out by hand."""
    fmt = FORMATS[name]
    one = torch.ones(1, 1, dtype=torch.float64)
    # One key: p, v, a, w and o are each rounded once.
    alone = head_bound((one, one, one), one, format=fmt).relative.item()
    assert alone == pytest.approx(5 * fmt.unit_roundoff, rel=2e-2)
    # Two equal keys: |Δs| ≤ 3u, ‖Δp‖ ≤ ½·3√2u + u/√2 = 2√2u, ‖V‖₂ = √5, a = 3/2.
    v = torch.tensor([[2.0], [1.0]], dtype=torch.float64)
    both = head_bound((one, one.expand(2, 1), v), one, format=fmt).relative.item()
    expected = (2 * 10**0.5 + 4 * 1.5) / 1.5
    assert both == pytest.approx(expected * fmt.unit_roundoff, rel=4e-2)
