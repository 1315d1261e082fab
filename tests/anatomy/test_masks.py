"""What counts as masked, and the two kinds of boolean mask torch has."""

import math

import pytest
import torch

from equipoise.anatomy.calls import (
    additive,
    future_QK,
    is_masked,
    masked_scores,
    masked_to_infinity,
    masks_some,
)

LOWEST = [torch.finfo(d).min for d in (torch.float16, torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("low", [-1e4, -65504.0, -1e9, *LOWEST, -math.inf])
@pytest.mark.parametrize("score", [-900.0, 0.0, 900.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_number_models_mask_with_is_masked(
    low: float, score: float, dtype: torch.dtype
) -> None:
    z = torch.tensor([score, score, math.nan], dtype=dtype)
    # fp16 itself holds nothing below -65504 but -inf.
    hidden = z + torch.tensor([0.0, low, 0.0]).to(dtype)
    assert is_masked(hidden).tolist() == [False, True, False]
    assert masked_to_infinity(hidden)[:2].tolist() == [score, -math.inf]
    assert masks_some(hidden[1:2]) and masks_some(low) and not masks_some(hidden[:1])


def test_an_empty_mask_hides_no_key() -> None:
    assert not masks_some(torch.zeros(0))
    assert not masks_some(torch.full((2,), -(10**6)))  # integers are added to no score


def test_kinds_of_mask() -> None:
    future = future_QK(slice(1, 3), 3, device=torch.device("cpu"))
    assert future.tolist() == [[False, False, True], [False, False, False]]
    z = torch.zeros(2, 3)
    shown = masked_scores(z, ~future)
    assert torch.equal(shown, masked_scores(z, additive(future)))
    assert torch.equal(shown.isinf(), future)
    assert torch.equal(additive(shown), shown)
