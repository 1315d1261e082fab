"""Condition numbers: exact, bracketed, scale-free."""

import pytest
import torch

from equipoise.numerics.formats import FORMATS
from equipoise_lab.theory.fragility_bounds import conditions
from tests.numerics.fragility_heads import heads
from tests.oracles import fragility as oracle


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
