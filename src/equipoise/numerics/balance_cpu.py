"""The ladder on the CPU: every row climbs only as far as it must.

Axes, in this file:  N row · K key · n visible key (p > 0), sorted from large to small.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.balance_compile import compiled, over_rows
from equipoise.numerics.balance_search import partition
from equipoise.numerics.balance_sorted import Row, Side

Rows = NDArray[np.floating]


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
def theta(inside: float, outside: float) -> float:
    """Return 4ab/(a+b)², written 1 - ((a-b)/(a+b))² where that rounds less."""
    total = inside + outside
    if 4.0 * min(inside, outside) > total:
        return 1.0 - ((inside - outside) / total) ** 2
    return 4.0 * (inside / total) * (outside / total)


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
def _row(
    p_K: Rows, mask_K: Side, enough: float, off: float, depth: int
) -> tuple[float, float]:
    total = 0.0
    for x in p_K:
        if not x >= 0.0:
            return np.nan, np.nan
        total += x
    if not abs(total - 1.0) <= off:
        return np.nan, np.nan
    seen = np.flatnonzero(p_K)
    v_n = p_K[seen].astype(np.float64)
    order = np.argsort(-v_n)
    v_n = v_n[order]
    side_n = np.empty(v_n.size, np.uint8)
    lower, upper = sorted_interval(v_n, side_n, enough, depth)
    if mask_K.size:
        mask_K[seen[order]] = side_n
    return lower, upper


@compiled()
def _rows(
    p_NK: Rows,
    mask_NK: NDArray[np.uint8],
    bounds_N2: NDArray[np.float64],
    options: tuple[float, float, int],
) -> None:
    enough, off, depth = options
    for i in range(p_NK.shape[0]):
        low, high = _row(p_NK[i], mask_NK[i], enough, off, depth)
        bounds_N2[i, 0] = low
        bounds_N2[i, 1] = high


def intervals(
    p_NK: Rows, mask_NK: NDArray[np.uint8], options: tuple[float, float, int]
) -> NDArray[np.float64]:
    """Return (lower, upper) of every row; fill ``mask_NK`` unless it has no columns.

    Args:
        p_NK: Contiguous rows, float32 or float64.
        mask_NK: Zeros, shaped like ``p_NK`` or (N, 0).
        options: Gap that is small enough (as a share of the mass), how far Σp may
            be from 1, and how many keys a complete search may hold.
    """
    bounds_N2 = np.empty((p_NK.shape[0], 2))

    def work(start: int, stop: int) -> None:
        rows = slice(start, stop)
        _rows(p_NK[rows], mask_NK[rows], bounds_N2[rows], options)

    over_rows(work, *p_NK.shape)
    return bounds_N2
