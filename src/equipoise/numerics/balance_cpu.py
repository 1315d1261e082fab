"""The ladder on the CPU: every row climbs only as far as it must.

Axes, in this file:  N row · K key · n visible key (p > 0), sorted from large to small.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.balance_compile import compiled, over_rows
from equipoise.numerics.balance_fill import OPEN, Bounds, Options, first_steps
from equipoise.numerics.balance_search import partition
from equipoise.numerics.balance_sorted import Row, Side, theta

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
def sorted_interval(
    v_n: Row, side_n: Side, enough: float, depth: int
) -> tuple[float, float]:
    """Return θ's interval for one sorted row without zeros, and S in ``side_n``.

    With p_max ≥ ½ the answer is S = {top}, whatever the rest looks like.
    """
    side_n[:] = 0
    side_n[0] = 1
    rest = exact_sum(v_n, side_n, 0)
    if v_n[0] >= rest:
        peaked = theta(v_n[0], rest)
        return peaked, peaked
    total = rest + v_n[0]
    gap, proven = partition(v_n, total / 2, side_n, enough * total, depth)
    lower = theta(exact_sum(v_n, side_n, 1), exact_sum(v_n, side_n, 0))
    if abs(gap) - proven <= 4 * v_n.size * 2.0**-53 * total:
        return lower, lower
    return lower, max(lower, 1.0 - 4.0 * (proven / total) ** 2)


@compiled()
def sorted_row(p_K: Row, side_K: Side, options: Options) -> tuple[float, float]:
    """Check one row, sort what is visible, and search it."""
    enough, off, depth = options
    total = 0.0
    for x in p_K:
        if not x >= 0.0:
            return np.nan, np.nan
        total += x
    if not abs(total - 1.0) <= off:
        return np.nan, np.nan
    seen = np.flatnonzero(p_K)
    order = seen[np.argsort(-p_K[seen])]
    side_n = np.empty(order.size, np.uint8)
    lower, upper = sorted_interval(p_K[order], side_n, enough, depth)
    side_K[:] = 0
    side_K[order] = side_n
    return lower, upper


@compiled()
def _sorted_rows(
    p_NK: Rows64, side_NK: Sides, bounds_N2: Bounds, options: Options
) -> None:
    for i in range(p_NK.shape[0]):
        low, high = sorted_row(p_NK[i], side_NK[i], options)
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
        rows = p_NK[which].astype(np.float64)
        sides, bounds = np.empty(rows.shape, np.uint8), np.empty((which.size, 2))
        _sorted_rows(rows, sides, bounds, options)
        bounds_N2[which] = bounds
        if side_NK is not None:
            side_NK[which] = sides


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
