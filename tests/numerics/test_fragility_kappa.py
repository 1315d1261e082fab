"""Condition numbers: exact, bracketed, scale-free."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from equipoise.numerics.formats import FORMATS
from equipoise.numerics.fragility_kappa import conditions, softmax_gain
from tests.numerics.fragility_heads import heads
from tests.oracles import fragility as oracle

gaps = st.sampled_from([0.0, 0.1, 1.0, 5.0, 16.0, 40.0])


@given(st.integers(0, 2**32 - 1), st.integers(2, 40), gaps)
def test_softmax_gain_is_the_largest_eigenvalue(seed: int, K: int, t: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    p = (t * torch.randn(4, K, generator=rng, dtype=torch.float64)).softmax(-1)
    found = softmax_gain(p)
    dense = torch.linalg.eigvalsh(
        torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    )
    # A dense eigensolver is accurate to ε·‖J‖ absolutely, ‖J‖ ≤ ½.
    torch.testing.assert_close(found, dense[..., -1], rtol=1e-12, atol=1e-15)
    entry = (p * (1 - p)).amax(-1)
    assert (found >= entry * (1 - 1e-12) - 1e-16).all()
    assert (found <= torch.minimum(2 * entry, p.amax(-1)) * (1 + 1e-12) + 1e-16).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_rows_keep_relative_accuracy(dtype: torch.dtype) -> None:
    # Two keys: λ = 2·p₁p₂ exactly, however small p₂.
    for small in (1e-3, 1e-9, 1e-20):
        p = torch.tensor([1 - small, small], dtype=dtype)
        p[0] = 1.0 if 1 - small == 1 else 1 - small
        exact = 2 * p[0].item() * p[1].item()
        assert softmax_gain(p).item() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(
    ("row", "expected"),
    [([1.0], 0.0), ([1.0, 0.0], 0.0), ([0.5, 0.5], 0.5), ([0.25] * 4, 0.25)],
)
def test_known_rows(row: list[float], expected: float) -> None:
    assert softmax_gain(torch.tensor(row)).item() == pytest.approx(expected, abs=1e-7)


def test_broken_rows_read_nan() -> None:
    assert softmax_gain(torch.tensor([math.nan, 0.5])).isnan()
    assert softmax_gain(torch.tensor([math.nan])).isnan()


def test_half_precision_rows_are_widened() -> None:
    p = torch.tensor([0.5, 0.5], dtype=torch.bfloat16)
    assert softmax_gain(p).item() == 0.5


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_first_order_bound_holds_for_moderate_heads(name: str) -> None:
    for head in heads(30, seed=4):
        found = conditions(head.qkv, head.w, visible_QK=head.visible)
        seen = oracle.measured_head_error(
            head.parts, FORMATS[name], visible=head.visible
        )
        assert seen <= found.first_order_bound(FORMATS[name])


def test_scale_free_and_at_least_one() -> None:
    for head in heads(12, seed=9):
        found = conditions(head.qkv, head.w, visible_QK=head.visible)
        moved = conditions(
            (head.q, head.k, 8 * head.v), head.w / 8, visible_QK=head.visible
        )
        for name in ("score", "value", "value_entries", "projection"):
            assert getattr(found, name) >= 1 - 1e-12 or head.visible is not None
            torch.testing.assert_close(
                getattr(found, name), getattr(moved, name), rtol=1e-6, atol=0
            )


def test_a_common_offset_of_scores_is_seen_only_unshifted() -> None:
    rng = torch.Generator().manual_seed(0)
    k = torch.randn(8, 4, generator=rng, dtype=torch.float64)
    q = torch.ones(8, 4, dtype=torch.float64)
    near = conditions((q, k, k), torch.eye(4, dtype=torch.float64))
    far = conditions((q, k + 1000, k), torch.eye(4, dtype=torch.float64))
    assert far.softmax > 500 * near.softmax
    torch.testing.assert_close(
        far.softmax_shifted, near.softmax_shifted, rtol=1e-9, atol=0
    )
