"""θ of sorted float64 rows: largest first, swaps, and proofs by counting keys.

Axes, in this file:  N row · n visible key (p > 0), sorted from large to small.
``side_n`` holds 1 where a key is in S. ``gap`` is ½ Σp - p(S), so that S is balanced
when gap = 0; a move of key k into S lowers the gap by p_k. Derivations:
docs/theta-kernels.md.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.compiled import compiled
from equipoise.numerics.rows.window import theta

Row = NDArray[np.float64]
Side = NDArray[np.uint8]
_SWAPS = 8
# Peaks above a plateau whose places are all tried: 2² of them.
_PEAKS = 3


@compiled()
def largest_first(v_n: Row, first: int, half: float, side_n: Side) -> float:
    """Fill S with every key that still fits under ½, largest first; return the gap.

    The smallest overshoot on the way is tried too: rounding loses a key on even uniform
    rows without it. Keys before ``first`` stay where they are.
    """
    gap, over, last = half, np.inf, -1
    for k in range(first, v_n.size):
        side_n[k] = 0
        if v_n[k] <= gap:
            side_n[k] = 1
            gap -= v_n[k]
        elif v_n[k] - gap < over:
            over, last = v_n[k] - gap, k
    if over >= gap:
        return gap
    side_n[last] = 1
    for k in range(last + 1, v_n.size):
        side_n[k] = 0
    return -over


@compiled()
def best_swap(v_n: Row, gap: float, side_n: Side) -> float:
    """Apply the one move or swap that brings the gap closest to 0; return the gap.

    Partners are walked together from large to small; position n stands for no key.
    """
    n = v_n.size
    best, leave, enter, before, i = abs(gap), n, n, n, 0
    for j in range(n + 1):
        if j < n and side_n[j] == 1:
            continue
        wanted = (v_n[j] if j < n else 0.0) - gap
        while i < n and (side_n[i] == 0 or v_n[i] > wanted):
            before = i if side_n[i] == 1 else before
            i += 1
        if before < n and v_n[before] - wanted < best:
            best, leave, enter = v_n[before] - wanted, before, j
        off = abs(wanted - (v_n[i] if i < n else 0.0))
        if off < best:
            best, leave, enter = off, i, j
    if leave < n:
        side_n[leave] = 0
        gap += v_n[leave]
    if enter < n:
        side_n[enter] = 1
        gap -= v_n[enter]
    return gap


@compiled()
def swapped(v_n: Row, gap: float, side_n: Side, enough: float) -> float:
    """Repeat the best swap until the gap is small enough or stops shrinking."""
    for _ in range(_SWAPS):
        if abs(gap) <= enough:
            break
        before = abs(gap)
        gap = best_swap(v_n, gap, side_n)
        if abs(gap) >= before:
            break
    return gap


@compiled()
def kept(gap: float, side_n: Side, trial: float, trial_n: Side) -> float:
    """Return the smaller gap; write its subset into ``side_n``."""
    if abs(trial) >= abs(gap):
        return gap
    side_n[:] = trial_n
    return trial


@compiled()
def _counted_gap(v_n: Row, first: int, target: float) -> tuple[float, int]:
    """Return how far every sum of some keys is from the target, and a likely count."""
    nearest, top, bottom = np.inf, 0.0, 0.0
    likely, off = 0, np.inf
    for c in range(v_n.size - first + 1):
        nearest = min(nearest, max(target - top, bottom - target, 0.0))
        middle = abs(target - (top + bottom) / 2)
        if middle < off:
            likely, off = c, middle
        if first + c < v_n.size:
            top += v_n[first + c]
            bottom += v_n[v_n.size - 1 - c]
    return nearest, likely


@compiled()
def _slid(v_n: Row, first: int, count: int, target: float, side_n: Side) -> float:
    """Choose ``count`` neighbours in the sorted order that sum nearly to the target."""
    gap = target
    for k in range(first, v_n.size):
        side_n[k] = k < first + count
        gap -= v_n[k] if side_n[k] else 0.0
    at = first
    while gap < 0.0 and 0 < count < v_n.size - at:
        side_n[at], side_n[at + count] = 0, 1
        gap += v_n[at] - v_n[at + count]
        at += 1
    return gap


@compiled()
def counted(
    v_n: Row, half: float, gap: float, side_n: Side, enough: float
) -> tuple[float, float]:
    """Return (gap, proven): the better of S and sets by counting; no |gap| is below."""
    proven, trial_n = 0.0, np.zeros(v_n.size, np.uint8)
    for t in range(min(_PEAKS, v_n.size - 1) + 1):
        if t > 0 and 2 * v_n[t] >= v_n[t - 1]:
            continue
        nearest = np.inf
        for places in range(1 << (t - 1) if t > 0 else 1):
            target = half
            for k in range(t):
                trial_n[k] = k == 0 or (places >> (k - 1)) & 1
                target -= v_n[k] if trial_n[k] else 0.0
            bound, count = _counted_gap(v_n, t, target)
            nearest = min(nearest, bound)
            trial = _slid(v_n, t, count, target, trial_n)
            trial = swapped(v_n, trial, trial_n, enough)
            gap = kept(gap, side_n, trial, trial_n)
        proven = max(proven, nearest)
    return gap, proven


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
def bounds_of(v_n: Row, side_n: Side, gap: float, proven: float) -> tuple[float, float]:
    """Return θ's interval from a set, its gap, and what no gap is below."""
    inside, outside = exact_sum(v_n, side_n, 1), exact_sum(v_n, side_n, 0)
    lower, total = theta(inside, outside), inside + outside
    if abs(gap) - proven <= 4 * v_n.size * 2.0**-53 * total:
        return lower, lower
    return lower, max(lower, 1.0 - 4.0 * (proven / total) ** 2)
