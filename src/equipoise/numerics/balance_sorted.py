"""Splitting a sorted row into two nearly equal halves: largest first, then swaps.

Axes, in this file:  n visible key, sorted from large to small.
``side_n`` holds 1 where a key is in S. ``gap`` is ½ Σp - p(S), so that S is
balanced when gap = 0; a move of key k into S lowers the gap by p_k.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.balance_compile import compiled

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
def best_swap(v_n: Row, gap: float, side_n: Side) -> float:
    """Apply the one move or swap that brings the gap closest to 0; return the gap.

    For a key j outside S the best partner i inside has p_i ≈ p_j - gap. Both lists are
    sorted, so the partner's position only moves forward: O(n) for all pairs.
    """
    n = v_n.size
    inside = np.append(np.flatnonzero(side_n), n)  # n stands for "no key": value 0
    outside = np.append(np.flatnonzero(side_n == 0), n)
    best, leave, enter, at = abs(gap), n, n, 0
    for j in outside:
        wanted = (v_n[j] if j < n else 0.0) - gap
        while at + 1 < inside.size and v_n[inside[at]] > wanted:
            at += 1
        for i in inside[max(at - 1, 0) : at + 1]:
            left = abs((v_n[i] if i < n else 0.0) - wanted)
            if left < best:
                best, leave, enter = left, i, j
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


@compiled()
def _counted_gap(v_m: Row, half: float, rest: float) -> float:
    """Return the distance from ½ to the nearest interval of ``cardinality_gap``."""
    nearest, top, bottom = np.inf, 0.0, 0.0
    for c in range(v_m.size + 1):
        nearest = min(nearest, max(half - (top + rest), bottom - half, 0.0))
        if c < v_m.size:
            top += v_m[c]
            bottom += v_m[v_m.size - 1 - c]
    return nearest


@compiled()
def cardinality_gap(v_n: Row, half: float) -> float:
    """Return a proven lower bound on |gap| over all subsets, by counting large keys.

    Take the m largest keys as large, the mass r of all others as slack. A subset with
    c large keys has p(S) in [Σ c smallest large, Σ c largest large + r]; if ½ lies
    in none of these intervals, its distance to the nearest one bounds every |gap|.
    Uniform rows of odd length are exact here, and so are rows close to them.
    """
    proven, rest = 0.0, 0.0
    for m in range(v_n.size, 0, -1):
        if rest >= v_n[0]:  # the intervals overlap from here on
            break
        proven = max(proven, _counted_gap(v_n[:m], half, rest))
        rest += v_n[m - 1]
    return proven
