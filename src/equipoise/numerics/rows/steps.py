"""θ of sorted float64 rows: largest first, swaps, proofs by counting, and a search.

Axes, in this file:  N row · n visible key (p > 0), sorted from large to small · m key
in a search · s subset sum of one half of these.
``side_n`` holds 1 where a key is in S. ``gap`` is ½ Σp - p(S), so that S is balanced
when gap = 0; a move of key k into S lowers the gap by p_k. Work is counted in visits of
a key or of a sum, about a nanosecond each; a row that used up its share stays an
interval. Derivations: docs/theta-kernels.md.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.compiled import compiled
from equipoise.numerics.rows.window import theta

Row = NDArray[np.float64]
Side = NDArray[np.uint8]
Bits = NDArray[np.int64]
Half = tuple[Row, Bits, int]
_SWAPS = 8
# Peaks above a plateau whose places are all tried: 2² of them.
_PEAKS = 3
# Visits at effort 1: with them no row takes more than about twenty times as long as an
# ordinary one. Rows of up to 26 keys are complete: with so few of them, ordinary rows
# are searched to the end too.
_WORK, _COMPLETE = 60_000, 26
# Keys in a complete search: 2¹⁰ to 2²⁰ sums in each half.
DEPTHS = (20, 26, 33, 40)


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


@compiled()
def _subset_sums(w_m: Row, first: int) -> Half:
    """Return all subset sums of w[first::2] in order, each once and with one subset."""
    room = 1 << ((w_m.size + 1) // 2)
    sum_s, bits_s = np.zeros(room), np.zeros(room, np.int64)
    merged_s, subset_s = np.zeros(room), np.zeros(room, np.int64)
    n = 1
    for k in range(first, w_m.size, 2):
        w, bit = w_m[k], np.int64(1) << np.int64(k // 2)
        i, j, size = 0, 0, 0
        while i < n or j < n:
            without = sum_s[i] if i < n else np.inf
            having = sum_s[j] + w if j < n else np.inf
            if without <= having:
                merged_s[size], subset_s[size] = without, bits_s[i]
                i += 1
                if without == having:
                    j += 1
            else:
                merged_s[size], subset_s[size] = having, bits_s[j] | bit
                j += 1
            size += 1
        sum_s, merged_s, bits_s, subset_s, n = merged_s, sum_s, subset_s, bits_s, size
    return sum_s, bits_s, n


@compiled()
def nearest_sums(
    a: Half, b: Half, target: float
) -> tuple[float, np.int64, np.int64, float, np.int64, np.int64]:
    """Return the largest subset sum ≤ target and the smallest > target, with subsets.

    A subset is two integers: bit i of the first is key 2i, of the second key 2i + 1.
    """
    a_s, b_s = a[0], b[0]
    below, below_i, below_j = -np.inf, 0, 0
    above, above_i, above_j = np.inf, 0, 0
    j = b[2] - 1
    for i in range(a[2]):
        while j >= 0 and a_s[i] + b_s[j] > target:
            if a_s[i] + b_s[j] < above:
                above, above_i, above_j = a_s[i] + b_s[j], i, j
            j -= 1
        if j < 0:
            break
        if a_s[i] + b_s[j] > below:
            below, below_i, below_j = a_s[i] + b_s[j], i, j
    up, down = (a[1][above_i], b[1][above_j]), (a[1][below_i], b[1][below_j])
    return below, down[0], down[1], above, up[0], up[1]


@compiled()
def _completed(
    v_n: Row, half: float, chosen: tuple[np.int64, np.int64, int], trial_n: Side
) -> float:
    """Place the m keys of a subset, and fill the others around them."""
    even, odd, m = chosen
    gap = half
    for k in range(m):
        trial_n[k] = ((odd if k % 2 else even) >> np.int64(k // 2)) & 1
        gap -= v_n[k] if trial_n[k] else 0.0
    return largest_first(v_n, m, gap, trial_n) if m < v_n.size else gap


@compiled()
def searched(
    v_n: Row, half: float, gap: float, side_n: Side, enough: float, m: int
) -> tuple[float, float]:
    """Search all subsets of the m largest keys, with the rest as slack.

    Returns the better gap, and a distance from ½ that no gap is below. The third trial
    has the rest as likely to be in S as not.
    """
    rest = v_n[m:].sum()
    first, second = _subset_sums(v_n[:m], 0), _subset_sums(v_n[:m], 1)
    below, a, b, above, c, d = nearest_sums(first, second, half)
    trial_n = np.zeros(v_n.size, np.uint8)
    for which in range(3 if m < v_n.size else 2):
        if which == 1:
            a, b = c, d
        elif which == 2:
            _, a, b, _, _, _ = nearest_sums(first, second, half - rest / 2)
        trial = _completed(v_n, half, (a, b, m), trial_n)
        trial = swapped(v_n, trial, trial_n, enough)
        gap = kept(gap, side_n, trial, trial_n)
    return gap, max(min(half - rest - below, above - half), 0.0)


@compiled()
def _visits(m: int) -> int:
    """Return about how much work all subsets of m keys are."""
    return 20 << (m // 2)


@compiled()
def partition(
    v_n: Row, half: float, side_n: Side, options: tuple[float, float]
) -> tuple[float, float]:
    """Return (gap, proven): a partition with that gap; no |gap| is below ``proven``."""
    (enough, effort), n = options, v_n.size
    gap = swapped(v_n, largest_first(v_n, 0, half, side_n), side_n, enough)
    if abs(gap) <= enough:
        return gap, 0.0
    gap, proven = counted(v_n, half, gap, side_n, enough)
    rounding = 4 * n * 2.0**-53 * half
    work, first = effort * _visits(n), n
    if n > _COMPLETE:
        work, first = effort * _WORK, DEPTHS[0]
    for depth in DEPTHS:
        m = min(max(depth, first), n)
        if abs(gap) <= max(enough, proven + rounding) or _visits(m) > work:
            break
        gap, bound = searched(v_n, half, gap, side_n, enough, m)
        proven, work = max(proven, bound), work - _visits(m)
        if m == n:
            break
    return gap, proven


@compiled()
def sorted_rows(
    v_Nn: Row, side_Nn: Side, bounds_N2: Row, options: tuple[float, float, float]
) -> None:
    """Write θ's bounds of rows sorted from large to small, and one subset of each.

    NaN and negative entries are last in this order.
    """
    enough, off, effort = options
    for i in range(v_Nn.shape[0]):
        v_n, side_n, n = v_Nn[i], side_Nn[i], v_Nn.shape[1]
        for k in range(n):
            side_n[k] = k == 0
        rest = exact_sum(v_n, side_n, 0)
        total = rest + v_n[0]
        low = high = theta(v_n[0], rest)
        if not (v_n[-1] >= 0.0 and abs(total - 1.0) <= off):
            low = high = np.nan
        elif v_n[0] < rest:
            while v_n[n - 1] == 0.0:
                n -= 1
            v_n, side_n = v_n[:n], side_n[:n]
            goal = enough * total, effort
            gap, proven = partition(v_n, total / 2, side_n, goal)
            low, high = bounds_of(v_n, side_n, gap, proven)
        bounds_N2[i, 0] = low
        bounds_N2[i, 1] = high
