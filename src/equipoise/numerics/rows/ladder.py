"""The steps on the CPU: every row goes only as far as it must.

Axes, in this file:  N row · K key · n visible key, sorted from large to small.
Float32 rows are first closed unsorted (``window``); what is left open, and every
float64 row, is sorted (``steps``).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.compiled import compiled, inner, over_rows, single
from equipoise.numerics.rows.steps import Row, Side, sorted_rows
from equipoise.numerics.rows.window import OPEN, Singles, row_bounds, scratch

Rows = NDArray[np.floating]
Bounds = NDArray[np.float64]
Options = tuple[float, float, float]
"""Gap that is small enough (as a share of the mass), how far Σp may be from 1, and the
effort of the search (0 for none)."""
_BITS_OF_TWO = 0x40000000
# Relative distance at which a mass may be that of one key twice, or of equal keys.
_ALIKE = 1e-6
# Entries of open rows gathered at a time.
_GATHERED = 1 << 18


@inner(reorder=True)
def _summed(p_K: Singles, bits_K: NDArray[np.uint32]) -> tuple[float, Any, Any, Any]:
    """Return the mass, the largest bit pattern, how many keys are positive, the last.

    Read as unsigned integers, a negative entry, -0 or a NaN exceeds any probability.
    """
    total, top, some, last = 0.0, np.uint32(0), np.int32(0), np.int32(0)
    for k in range(p_K.size):
        total += p_K[k]
        top = bits_K[k] if bits_K[k] > top else top
        some += np.int32(p_K[k] > 0)
        place = np.int32(k) if p_K[k] > 0 else np.int32(0)
        last = place if place > last else last
    return total, top, some, last


@inner(reorder=True)
def _apart(p_K: Singles, top: np.float32) -> tuple[float, Any]:
    """Return the mass below the largest key, summed directly, and how many equal it."""
    below, tops = 0.0, np.int32(0)
    for k in range(p_K.size):
        below += float(p_K[k]) if p_K[k] < top else 0.0
        tops += np.int32(p_K[k] == top)
    return below, tops


@compiled()
def close(
    p_NK: Singles,
    bits_NK: NDArray[np.uint32],
    bounds_N2: Row,
    options: tuple[float, float],
    room: Singles,
) -> None:
    """Write θ's interval of every row that is sound; others stay as they are."""
    enough, off = options
    for i in range(p_NK.shape[0]):
        total, pattern, some, last = _summed(p_NK[i], bits_NK[i])
        top, tops = single(np.int32(pattern)), np.int32(1)
        if not (0 < pattern < _BITS_OF_TWO and abs(total - 1.0) <= off):
            continue
        below, ratio = total - float(top), total / top
        if ratio < 2 + _ALIKE or abs(ratio - np.rint(ratio)) <= _ALIKE * ratio:
            below, tops = _apart(p_NK[i], top)
        facts = (np.int64(last) + 1, total, enough * total)
        keys = (below, np.float64(top), np.int64(tops), np.int64(some))
        bounds_N2[i, 0], bounds_N2[i, 1] = row_bounds(p_NK[i], facts, keys, room)


def finish(
    p_NK: Rows, side_NK: Side | None, bounds_N2: Bounds, options: Options
) -> None:
    """Sort and search the rows whose upper bound is still ``OPEN``, a few at a time."""
    left = np.flatnonzero(bounds_N2[:, 1] == OPEN)
    few = max(1, _GATHERED // p_NK.shape[1])
    for start in range(0, left.size, few):
        which = left[start : start + few]
        falling, bounds_n2 = -p_NK[which].astype(np.float64), np.empty((which.size, 2))
        sides = np.empty(falling.shape, np.uint8)
        if side_NK is None:  # sorting values alone is several times faster
            falling.sort(-1)
            sorted_rows(-falling, sides, bounds_n2, options)
        else:
            order = np.argsort(falling, -1)
            falling = np.take_along_axis(falling, order, -1)
            sorted_rows(-falling, sides, bounds_n2, options)
            side_NK[which] = np.take_along_axis(sides, np.argsort(order, -1), -1)
        bounds_N2[which] = bounds_n2


def intervals(p_NK: Rows, mask_NK: Side | None, options: Options) -> Bounds:
    """Return (lower, upper) of every row; write the subsets into ``mask_NK`` if given.

    With a mask every row is sorted, since only sorted rows have their subsets written
    down. A masked key may be marked; it adds nothing.
    """
    bounds_N2 = np.full((p_NK.shape[0], 2), OPEN)

    def work(start: int, stop: int) -> None:
        p, bounds_n2 = p_NK[start:stop], bounds_N2[start:stop]
        sides = None if mask_NK is None else mask_NK[start:stop]
        if p.dtype == np.float32 and sides is None:
            room = scratch(p.shape[1])
            close(p, p.view(np.uint32), bounds_n2, options[:2], room)
        finish(p, sides, bounds_n2, options)

    over_rows(work, *p_NK.shape)
    return bounds_N2
