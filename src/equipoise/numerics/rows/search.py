"""The deep end of the ladder: one row, sorted, until its gap is closed or proven.

Axes, in this file:  n visible key, sorted from large to small · m key in a search.
Signs as in ``balance_sorted``: gap = ½ Σp - p(S), side 1 where a key is in S.

Branch and bound over the keys of a sorted row: complete when the row is steep.

Axes, in this file:  n visible key, sorted from large to small.
Signs as in ``balance_sorted``: gap = ½ Σp - p(S), side 1 where a key is in S.

Karmarkar and Karp's differencing: the two largest keys to opposite sides, repeat.

Axes, in this file:  n visible key, sorted from large to small.

Meet in the middle: the subset sum nearest a target, out of 2ᵐ, for about 2^(m/2).

Axes, in this file:  m key taken into the search · s subset sum of one half.
Keys are dealt in turn to two halves. Each half lists its subset sums in order, built by
merging one key at a time; equal sums are kept once, so repeated keys stay cheap.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.rows.compiled import compiled
from equipoise.numerics.rows.proofs import cardinality_gap, lattice_gap
from equipoise.numerics.rows.sorted_rows import Row, Side, largest_first, swapped


@compiled()
def _after(v_n: Row) -> Row:
    """Return the mass of the keys from each position on, and 0 at the end."""
    rest_n = np.zeros(v_n.size + 1)
    for k in range(v_n.size - 1, -1, -1):
        rest_n[k] = rest_n[k + 1] + v_n[k]
    return rest_n


@compiled()
def branched(
    v_n: Row, half: float, gap: float, side_n: Side, enough: float, most: int
) -> tuple[float, bool]:
    """Try each key in S, then out of it, large keys first; return (gap, complete).

    A branch ends when S is full, or when all that is left does not fill it. Keys that
    dominate the rest leave few branches, so a steep row is searched completely. The
    largest key is in S: its complement is the same partition.
    """
    rest_n = _after(v_n)
    inside_n = np.zeros(v_n.size + 1, np.uint8)
    # One gap per level, not one that is added to and subtracted from: that drifts.
    gap_n = np.empty(v_n.size + 1)
    inside_n[0], gap_n[0], gap_n[1], k = 1, half, half - v_n[0], 1
    for _ in range(most):
        left = gap_n[k]
        if 0.0 < left < rest_n[k]:
            inside_n[k], gap_n[k + 1] = 1, left - v_n[k]
            k += 1
            continue
        all_in = left > 0.0
        end = left - rest_n[k] if all_in else left
        if abs(end) < abs(gap):
            gap = end
            side_n[:k] = inside_n[:k]
            side_n[k:] = all_in
            if abs(gap) <= enough:
                return gap, False
        k -= 1
        while not inside_n[k]:
            k -= 1
        if k == 0:
            return gap, True
        inside_n[k], gap_n[k + 1] = 0, gap_n[k]
        k += 1
    return gap, False


@compiled()
def _sink(heap_n: Row, key_n: NDArray[np.int64], size: int) -> None:
    """Restore the heap order after its first entry became smaller."""
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap_n[child + 1] > heap_n[child]:
            child += 1
        if heap_n[at] >= heap_n[child]:
            return
        heap_n[at], heap_n[child] = heap_n[child], heap_n[at]
        key_n[at], key_n[child] = key_n[child], key_n[at]
        at = child


@compiled()
def differenced(v_n: Row, side_n: Side) -> float:
    """Write the differencing partition into ``side_n``; return its gap.

    Each step replaces the two largest numbers a ≥ b by a - b, which promises that they
    end on opposite sides; reading the promises backwards gives the sides.
    """
    n = v_n.size
    heap_n, key_n = (
        v_n.copy(),
        np.arange(n, dtype=np.int64),
    )  # sorted from large to small is a heap
    kept, hung = np.empty(n, np.int64), np.empty(n, np.int64)
    for step in range(n - 1):
        first, first_key, size = heap_n[0], key_n[0], n - step
        heap_n[0], key_n[0] = heap_n[size - 1], key_n[size - 1]
        _sink(heap_n, key_n, size - 1)
        kept[step], hung[step] = first_key, key_n[0]
        heap_n[0], key_n[0] = first - heap_n[0], first_key
        _sink(heap_n, key_n, size - 1)
    side_n[key_n[0]] = 0
    for step in range(n - 2, -1, -1):
        side_n[hung[step]] = 1 - side_n[kept[step]]
    gap: float = heap_n[0] / 2
    return gap


Bits = NDArray[np.int64]


@compiled()
def _subset_sums(w_m: Row, first: int) -> tuple[Row, Bits]:
    """Return all subset sums of w[first::2] in order, each with one subset as bits."""
    sum_s, bits_s = np.zeros(1), np.zeros(1, np.int64)
    for k in range(first, w_m.size, 2):
        w, bit = w_m[k], np.int64(1) << np.int64(k // 2)
        n = sum_s.size
        merged, subset = np.empty(2 * n), np.empty(2 * n, np.int64)
        i, j, size = 0, 0, 0
        while i < n or j < n:
            without = sum_s[i] if i < n else np.inf
            having = sum_s[j] + w if j < n else np.inf
            if without <= having:
                merged[size], subset[size] = without, bits_s[i]
                i += 1
                if without == having:
                    j += 1
            else:
                merged[size], subset[size] = having, bits_s[j] | bit
                j += 1
            size += 1
        sum_s, bits_s = merged[:size], subset[:size]
    return sum_s, bits_s


@compiled()
def nearest_sums(
    w_m: Row, target: float
) -> tuple[float, np.int64, np.int64, float, np.int64, np.int64]:
    """Return the largest subset sum ≤ target and the smallest > target, with subsets.

    A subset is two integers: bit i of the first is key 2i, of the second key 2i + 1.
    """
    a_s, a_bits = _subset_sums(w_m, 0)
    b_s, b_bits = _subset_sums(w_m, 1)
    below, below_i, below_j = -np.inf, 0, 0
    above, above_i, above_j = np.inf, 0, 0
    j = b_s.size - 1
    for i in range(a_s.size):
        while j >= 0 and a_s[i] + b_s[j] > target:
            if a_s[i] + b_s[j] < above:
                above, above_i, above_j = a_s[i] + b_s[j], i, j
            j -= 1
        if j < 0:
            break
        if a_s[i] + b_s[j] > below:
            below, below_i, below_j = a_s[i] + b_s[j], i, j
    return (
        below,
        a_bits[below_i],
        b_bits[below_j],
        above,
        a_bits[above_i],
        b_bits[above_j],
    )


# Keys in a complete search: 2¹⁰ to 2²⁰ sums in each half.
DEPTHS = (20, 26, 33, 40)
# Keys reassigned at a time; each further pair makes the reachable sums twice as dense.
_NEIGHBOURS = (16, 20, 26)
# Branches tried per key before a row that is not steep goes on to the next step.
_BRANCHES = 8


@compiled()
def _place(a: np.int64, b: np.int64, side_m: Side) -> None:
    """Write the subset found by ``nearest_sums`` into the first sides."""
    for k in range(side_m.size):
        bits = b if k % 2 else a
        side_m[k] = (bits >> np.int64(k // 2)) & 1


@compiled()
def _completed(v_n: Row, half: float, trial_n: Side, m: int, enough: float) -> float:
    """Fill the keys after the first m around the sides already chosen."""
    gap = half
    for k in range(m):
        gap -= v_n[k] * trial_n[k]
    if m == v_n.size:
        return gap
    gap = largest_first(v_n[m:], gap, trial_n[m:])
    return swapped(v_n, gap, trial_n, enough)


@compiled()
def searched(
    v_n: Row, half: float, gap: float, side_n: Side, enough: float, m: int
) -> tuple[float, float]:
    """Search all subsets of the m largest keys, with the rest as slack.

    A subset of the large keys with sum s becomes p(S) in [s, s + r] once the rest (mass
    r) is dealt out, so no |gap| is below the distance from ½ to the nearest such
    interval. Returns the better gap and that proven distance.
    """
    rest = v_n[m:].sum()
    below, a, b, above, c, d = nearest_sums(v_n[:m], half)
    trial_n = np.zeros_like(side_n)
    for which in range(3):
        if which == 2 and m < v_n.size:  # the rest as likely to be in S as not
            _, a, b, _, _, _ = nearest_sums(v_n[:m], half - rest / 2)
        elif which == 2:
            break
        trial_n[:] = 0
        if which == 1:
            _place(c, d, trial_n[:m])
        else:
            _place(a, b, trial_n[:m])
        trial = _completed(v_n, half, trial_n, m, enough)
        if abs(trial) < abs(gap):
            gap = trial
            side_n[:] = trial_n
    return gap, max(min(half - rest - below, above - half), 0.0)


@compiled()
def reshuffled(v_n: Row, gap: float, side_n: Side) -> float:
    """Reassign the given keys at once, all others held; return the gap.

    Moving key k in or out of S changes the gap by ∓p_k: the best of all combined moves
    is the subset of these signed numbers nearest the gap.
    """
    move_m = np.empty(v_n.size)
    for k in range(v_n.size):
        move_m[k] = -v_n[k] if side_n[k] else v_n[k]
    below, a, b, above, c, d = nearest_sums(move_m, gap)
    nearest = below
    if above - gap < gap - below:
        nearest, a, b = above, c, d
    if abs(gap - nearest) >= abs(gap):
        return gap
    flip_m = np.empty(v_n.size, np.uint8)
    _place(a, b, flip_m)
    for k in range(v_n.size):
        side_n[k] ^= flip_m[k]
    return gap - nearest


@compiled()
def _improved(v_n: Row, gap: float, side_n: Side, enough: float) -> float:
    """Differencing, then reshuffling of small keys and of keys of every size."""
    trial_n = np.empty_like(side_n)
    trial = swapped(v_n, differenced(v_n, trial_n), trial_n, enough)
    if abs(trial) < abs(gap):
        gap = trial
        side_n[:] = trial_n
    for m in _NEIGHBOURS:
        for attempt in range(min(v_n.size // m, 3)):
            if abs(gap) <= enough:
                return gap
            # Every step-th key, so of all sizes; copied, since a view with steps would
            # compile everything once more.
            chosen = np.arange(m) * (v_n.size // m) + attempt
            side_m = side_n[chosen]
            gap = reshuffled(v_n[chosen], gap, side_m)
            side_n[chosen] = side_m
            last = v_n.size - m * attempt
            gap = reshuffled(v_n[last - m : last], gap, side_n[last - m : last])
    return gap


@compiled()
def partition(
    v_n: Row, half: float, side_n: Side, enough: float, depth: int
) -> tuple[float, float]:
    """Return (gap, proven): a partition with that gap, and no |gap| below ``proven``.

    Stops as soon as |gap| ≤ enough, or the two agree, or ``depth`` keys were searched.
    """
    rounding = 4 * v_n.size * 2.0**-53 * half
    gap = swapped(v_n, largest_first(v_n, half, side_n), side_n, enough)
    if abs(gap) <= enough:
        return gap, 0.0
    proven = max(cardinality_gap(v_n, half), lattice_gap(v_n, half, enough))
    if abs(gap) - proven <= rounding:
        return gap, proven
    gap, complete = branched(v_n, half, gap, side_n, enough, _BRANCHES * v_n.size)
    if complete or abs(gap) <= enough:
        return gap, abs(gap) if complete else 0.0
    if v_n.size > DEPTHS[0]:
        gap = _improved(v_n, gap, side_n, enough)
    for m in DEPTHS:
        if abs(gap) <= max(enough, proven + rounding) or m > depth:
            break
        gap, bound = searched(v_n, half, gap, side_n, enough, min(m, v_n.size))
        proven = max(proven, bound)
        if m >= v_n.size:
            break
    return gap, proven
