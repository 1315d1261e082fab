"""Which keys a query may see: boolean and additive masks, and what counts as masked.

Axes, in this file:  Q query · K key.

A score is masked when it is at most ``MASKED``. Models mask with -inf, the lowest
number of a dtype, -1e9, or (BERT's first code, and fp16 models) -1e4 plus the score,
which may be a thousand; no score of a visible key is that low, and exp of it is 0 in
every format. Only scores and the masks added to them are judged so: an activation of
-1e4 is a number like any other.
"""

import math

import torch
from torch import Tensor

MASKED = -9e3


def is_masked(score: Tensor) -> Tensor:
    """Return where scores, or an additive mask, hide a key; NaN hides none.

    >>> is_masked(torch.tensor([0.0, -1e4 + 900, -1e9, -torch.inf, torch.nan])).tolist()
    [False, True, True, True, False]
    """
    return score <= MASKED


def masks_some(x: Tensor | float) -> bool:
    """Return whether a constant that is added to scores would hide a key."""
    if isinstance(x, Tensor):
        return bool(x.is_floating_point() and x.numel() and is_masked(x.min()))
    return x <= MASKED


def masked_to_infinity(score: Tensor) -> Tensor:
    """Return scores with -inf for every key that is masked."""
    return score.masked_fill(is_masked(score), -math.inf)


def future_QK(queries: slice, keys: int, *, device: torch.device) -> Tensor:
    """Return where key > query, counted from the upper left corner as torch does."""
    i_Q = torch.arange(queries.start, queries.stop, device=device)
    j_K = torch.arange(keys, device=device)
    return j_K[None, :] > i_Q[:, None]


def additive(hides: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an additive mask from ``nn.MultiheadAttention``'s kind: True hides."""
    if hides.dtype != torch.bool:
        return hides.detach()
    return torch.zeros_like(hides, dtype=dtype).masked_fill(hides, -math.inf)


def masked_scores(score: Tensor, mask: Tensor) -> Tensor:
    """Return scores under a mask of fused attention's kind: True shows, or additive."""
    if mask.dtype == torch.bool:
        return score.masked_fill(~mask, -math.inf)
    return score + mask
