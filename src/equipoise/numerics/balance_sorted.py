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
_PLATEAUS = 4


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
    Uniform rows of odd length are exact here, and so are rows close to them. Only the
    ends of plateaus are tried as m (the next key is less than half as large), and few
    of them: elsewhere the intervals overlap, and steep rows are better searched.
    """
    proven, rest, tried = 0.0, 0.0, 0
    for m in range(v_n.size, 0, -1):
        if rest >= v_n[0] or tried == _PLATEAUS:
            break
        if m == v_n.size or 2 * v_n[m] < v_n[m - 1]:
            proven = max(proven, _counted_gap(v_n[:m], half, rest))
            tried += 1
        rest += v_n[m - 1]
    return proven
