"""Splitting a sorted row into two nearly equal halves: largest first, then swaps.

Axes, in this file:  n visible key, sorted from large to small.
``side_n`` holds 1 where a key is in S. ``gap`` is ½ Σp - p(S), so that S is
balanced when gap = 0; a move of key k into S lowers the gap by p_k.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.rows.compiled import compiled

Row = NDArray[np.float64]
Side = NDArray[np.uint8]


@compiled()
def theta(inside: float, outside: float) -> float:
    """Return 4ab/(a+b)², written 1 - ((a-b)/(a+b))² where that rounds less."""
    total = inside + outside
    if 4.0 * min(inside, outside) > total:
        return 1.0 - ((inside - outside) / total) ** 2
    return 4.0 * (inside / total) * (outside / total)


@compiled()
def largest_first(v_n: Row, half: float, side_n: Side) -> float:
    """Fill S with every key that still fits under ½, largest first; return the gap.

    The answer is the better of the final set and the smallest overshoot on the way
    (S so far, plus a key that did not fit). Rounding loses a key on even uniform rows
    without the second.
    """
    gap, over, last = half, np.inf, -1
    for k in range(v_n.size):
        side_n[k] = 0
        if v_n[k] <= gap:
            side_n[k] = 1
            gap -= v_n[k]
        elif v_n[k] - gap < over:
            over, last = v_n[k] - gap, k
    if over >= gap:
        return gap
    side_n[last] = 1
    side_n[last + 1 :] = 0
    return -over


@compiled()
def _next(side_n: Side, k: int, which: int) -> int:
    """Return the first key after k on one side; n, worth 0, when there is none."""
    k += 1
    while k < side_n.size and side_n[k] != which:
        k += 1
    return k


@compiled()
def best_swap(v_n: Row, gap: float, side_n: Side) -> float:
    """Apply the one move or swap that brings the gap closest to 0; return the gap.

    For a key j outside S the best partner i inside has p_i ≈ p_j - gap. Both are walked
    from large to small, so the partner only moves forward: O(n) for all pairs. Position
    n stands for no key.
    """
    n = v_n.size
    best, leave, enter = abs(gap), n, n
    before, i, j = n, _next(side_n, -1, 1), -1
    while j < n:
        j = _next(side_n, j, 0)
        wanted = (v_n[j] if j < n else 0.0) - gap
        while i < n and v_n[i] > wanted:
            before, i = i, _next(side_n, i, 1)
        if before < n and v_n[before] - wanted < best:
            best, leave, enter = v_n[before] - wanted, before, j
        if abs(wanted - (v_n[i] if i < n else 0.0)) < best:
            best, leave, enter = abs(wanted - (v_n[i] if i < n else 0.0)), i, j
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
    for _ in range(8):
        if abs(gap) <= enough:
            break
        before = abs(gap)
        gap = best_swap(v_n, gap, side_n)
        if abs(gap) >= before:
            break
    return gap
