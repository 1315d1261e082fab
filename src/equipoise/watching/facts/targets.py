"""Comparison of a loss's targets with the ids that the model read.

All counts stay on the device. Rows that are compared lie in the model's output at
``start``; the target at place t meets the ids at shift s where it equals id t + s.

Axes, in this file:  B sequence · T position · S shift.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SHIFTS = (0, 1, 2, 3, -1)
"""Distances at which targets are compared with ids; 1 is the next token."""
MOST_POSITIONS = 1 << 14
"""Larger batches: the first sequences are compared."""
MOST_PAIRS = 1 << 21


def first_sequences(*each_BT: Tensor) -> list[Tensor]:
    """Return as many sequences of each as are compared."""
    rows = max(1, MOST_POSITIONS // max(1, each_BT[0].shape[1]))
    return [x_BT[:rows] for x_BT in each_BT]


def paired(length: int, ids: int, start: int, shift: int) -> tuple[slice, slice]:
    """Return which targets have an id at this shift, and which ids those are."""
    first = max(0, -(start + shift))
    last = min(length, ids - start - shift)
    last = max(first, last)
    return slice(first, last), slice(first + start + shift, last + start + shift)


def meetings(
    target_BT: Tensor, counted_BT: Tensor, ids_BT: Tensor, *, start: int
) -> dict[str, Any]:
    """Count at each shift the targets that are compared, and those that are equal."""
    compared, equal = list[Tensor](), list[Tensor]()
    for shift in SHIFTS:
        here, there = paired(target_BT.shape[1], ids_BT.shape[1], start, shift)
        counts_BT = counted_BT[:, here]
        same_BT = target_BT[:, here] == ids_BT[:, there]
        compared.append(counts_BT.sum())
        equal.append((same_BT & counts_BT).sum())
    return {
        "shifts": list(SHIFTS),
        "compared": torch.stack(compared),
        "equal": torch.stack(equal),
    }


def distinct(target_BT: Tensor, counted_BT: Tensor) -> Tensor:
    """Count counted targets that differ from the one before them in their row."""
    both_BT = counted_BT[:, 1:] & counted_BT[:, :-1]
    return ((target_BT[:, 1:] != target_BT[:, :-1]) & both_BT).sum()


def rows_of_others(
    target_BT: Tensor, counted_BT: Tensor, ids_BT: Tensor, *, start: int
) -> Mapping[str, Tensor] | None:
    """Count rows whose targets are their own next ids, or only another row's.

    A row says something from 8 counted targets on.
    """
    here, there = paired(target_BT.shape[1], ids_BT.shape[1], start, 1)
    t_BT, c_BT, i_BT = target_BT[:, here], counted_BT[:, here], ids_BT[:, there]
    rows = int((MOST_PAIRS // max(1, t_BT.shape[1])) ** 0.5)
    t_BT, c_BT, i_BT = t_BT[:rows], c_BT[:rows], i_BT[:rows]
    if len(t_BT) < 2:
        return None
    agree_BBT = (t_BT[:, None] == i_BT[None]) | ~c_BT[:, None]
    same_BB, says_B = agree_BBT.all(-1), c_BT.sum(-1) >= 8
    own_B = same_BB.diagonal()
    other_B = same_BB.any(-1) & ~own_B
    return {
        "rows": says_B.sum(),
        "own": (own_B & says_B).sum(),
        "others": (other_B & says_B).sum(),
    }


def document_ends(
    target_BT: Tensor,
    counted_BT: Tensor,
    ids_BT: Tensor,
    ends: tuple[int, ...],
    *,
    start: int,
) -> Mapping[str, Tensor]:
    """Count documents that end in the batch, and ends that are a counted target.

    An end is the first of the ids that mean it, after an id that is a counted target.
    """
    here, there = paired(target_BT.shape[1], ids_BT.shape[1], start, 1)
    t_BT, c_BT, i_BT = target_BT[:, here], counted_BT[:, here], ids_BT[:, there]
    is_end_BT = _among(i_BT, ends)
    begins_BT = is_end_BT[:, 1:] & ~is_end_BT[:, :-1] & c_BT[:, :-1]
    return {
        "documents": begins_BT.sum(),
        "targets": (_among(t_BT, ends) & c_BT).sum(),
    }


def _among(x: Tensor, ids: tuple[int, ...]) -> Tensor:
    found = torch.zeros_like(x, dtype=torch.bool)
    for one in ids:
        found = found | (x == one)
    return found


def fingerprint(x: Tensor) -> Tensor:
    """Return three 21-bit numbers of a tensor's content, on its device.

    From more than 65,536 numbers some are taken, spread evenly.
    """
    flat = x.detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // (1 << 16))]
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.is_floating_point():
        flat = flat.float().contiguous().view(torch.int32)
    whole = flat.to(torch.int64) + 1
    place = torch.arange(1, len(whole) + 1, device=whole.device, dtype=torch.int64)
    # Odd multipliers of a place, products modulo 2⁶⁴: a change of one number shows.
    mixed = whole * (place * -7046029254386353131 | 1)
    total = (mixed ^ (mixed >> 29)).sum()
    bits = (1 << 21) - 1
    return torch.stack([total & bits, (total >> 21) & bits, (total >> 42) & bits])
