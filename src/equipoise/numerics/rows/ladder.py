"""The ladder on the CPU: every row climbs only as far as it must.

Axes, in this file:  N row · K key · n visible key (p > 0), sorted from large to small.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.rows.compiled import compiled, over_rows
from equipoise.numerics.rows.fill import OPEN, Bounds, Options, first_steps
from equipoise.numerics.rows.search import partition
from equipoise.numerics.rows.sorted_rows import Row, Side, theta

Rows = NDArray[np.floating]
Rows64 = NDArray[np.float64]
Sides = NDArray[np.uint8]
# Entries of open rows gathered at a time.
_GATHERED = 1 << 18


@compiled()
def exact_sum(v_n: Row, side_n: Side, which: int) -> float:
    """Return the sum of the keys on one side, compensated (Neumaier)."""
    total, lost = 0.0, 0.0
    for k in range(v_n.size):
        if side_n[k] == which:
            x = v_n[k]
            new = total + x
            lost += (total - new) + x if total >= x else (x - new) + total
            total = new
    return total + lost


@compiled()
def sorted_interval(v_n: Row, side_n: Side, options: Options) -> tuple[float, float]:
    """Return θ's interval for one row sorted from large to small; S in ``side_n``.

    NaN and negative entries are last in this order. With p_max ≥ ½ the answer is
    S = {top}, whatever the rest looks like.
    """
    enough, off, depth = options
    side_n[:] = 0
    side_n[0] = 1
    rest = exact_sum(v_n, side_n, 0)
    total = rest + v_n[0]
    if not (v_n[-1] >= 0.0 and abs(total - 1.0) <= off):
        return np.nan, np.nan
    if v_n[0] >= rest:
        peaked = theta(v_n[0], rest)
        return peaked, peaked
    n = np.count_nonzero(v_n)
    v_n, side_n = v_n[:n], side_n[:n]
    gap, proven = partition(v_n, total / 2, side_n, enough * total, depth)
    lower = theta(exact_sum(v_n, side_n, 1), exact_sum(v_n, side_n, 0))
    if abs(gap) - proven <= 4 * n * 2.0**-53 * total:
        return lower, lower
    return lower, max(lower, 1.0 - 4.0 * (proven / total) ** 2)


@compiled()
def _sorted_rows(
    v_Nn: Rows64, side_Nn: Sides, bounds_N2: Bounds, options: Options
) -> None:
    n = v_Nn.shape[1]
    for i in range(v_Nn.shape[0]):
        low, high = sorted_interval(v_Nn[i], side_Nn[i, :n], options)
        bounds_N2[i, 0] = low
        bounds_N2[i, 1] = high


def _finish(
    p_NK: Rows, side_NK: Sides | None, bounds_N2: Bounds, options: Options
) -> None:
    """Sort and search the rows whose lower bound is still ``OPEN``, a few at a time.

    A kernel of its own, in float64 only: nested in the first one it would be compiled
    again with it, at several times the cost.
    """
    left = np.flatnonzero(bounds_N2[:, 0] == OPEN)
    few = max(1, _GATHERED // p_NK.shape[1])
    for start in range(0, left.size, few):
        which = left[start : start + few]
        falling = -p_NK[which].astype(np.float64)
        sides, bounds = np.empty(falling.shape, np.uint8), np.empty((which.size, 2))
        if side_NK is None:  # sorting values alone is several times faster
            seen: NDArray[np.bool_] = np.any(falling, axis=0)
            seen[0] = True  # a row without mass still needs a key
            # Selecting columns may transpose the memory; rows must stay contiguous.
            falling = np.sort(np.ascontiguousarray(falling[:, seen]), -1)
            _sorted_rows(-falling, sides, bounds, options)
        else:
            order = np.argsort(falling, -1)
            falling = np.take_along_axis(falling, order, -1)
            _sorted_rows(-falling, sides, bounds, options)
            side_NK[which] = np.take_along_axis(sides, np.argsort(order, -1), -1)
        bounds_N2[which] = bounds


def intervals(p_NK: Rows, mask_NK: Sides | None, options: Options) -> Bounds:
    """Return (lower, upper) of every row; write the subsets into ``mask_NK`` if given.

    Args:
        p_NK: Contiguous rows, float32 or float64.
        mask_NK: Shaped like ``p_NK``. A masked key may be marked; it adds nothing.
        options: Gap that is small enough (as a share of the mass), how far Σp may
            be from 1, and how many keys a complete search may hold.
    """
    bounds_N2 = np.full((p_NK.shape[0], 2), OPEN)

    def work(start: int, stop: int) -> None:
        p, bounds = p_NK[start:stop], bounds_N2[start:stop]
        sides = None if mask_NK is None else mask_NK[start:stop]
        if p.dtype == np.float32:
            one = np.empty((1, p.shape[1]), np.uint8)
            first_steps(p, one if sides is None else sides, bounds, options)
        _finish(p, sides, bounds, options)

    over_rows(work, *p_NK.shape)
    return bounds_N2
