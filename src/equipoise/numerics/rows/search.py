"""The last steps for one sorted row, until its gap is closed or proven.

Axes, in this file:  n visible key, sorted from large to small · m key in a search ·
s subset sum of one half of these. Signs as in ``steps``. Work is counted in visits of
a key or of a sum, about a nanosecond each; a row that used up its share stays an
interval. Derivations: docs/theta-kernels.md.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.compiled import compiled
from equipoise.numerics.rows.steps import Row, Side, bounds_of, largest_first, swapped

Bits = NDArray[np.int64]
Half = tuple[Row, Bits, int]
# Visits at effort 1, and per key of the row: with them no row takes more than about
# twenty times as long as an ordinary one. Rows of up to 26 keys are complete: with so
# few of them, ordinary rows are searched to the end too.
_LEAST_WORK, _WORK_PER_KEY, _COMPLETE = 60_000, 192, 26
# Keys in a complete search: 2¹⁰ to 2²⁰ sums in each half.
DEPTHS = (20, 26, 33, 40)
# Keys reassigned at a time; each further pair makes the reachable sums twice as dense.
_NEIGHBOURS = (16, 20, 26)
# Branches tried per key before a row that is not steep goes on to the next step.
_BRANCHES = 8
# Remainders below this share of the largest key are rounding.
_ROUNDING = 1e-13


@compiled()
def lattice_gap(v_n: Row, half: float, least: float) -> float:
    """Return a proven lower bound on |gap| from a common divisor of the keys."""
    unit, tiny = v_n[0], _ROUNDING * v_n[0]
    for k in range(1, v_n.size):
        a, b = unit, v_n[k]
        while b > tiny:
            a, b = b, a - b * np.floor(a / b + 1e-9)
        unit = a
        if unit < least:
            return 0.0
    multiples, off = 0.0, 0.0
    for k in range(v_n.size):
        multiples += np.rint(v_n[k] / unit)
    unit = 2 * half / multiples
    for k in range(v_n.size):
        off += abs(v_n[k] - np.rint(v_n[k] / unit) * unit)
    missing = abs(half - np.rint(half / unit) * unit)
    return float(max(missing - off, 0.0))


@compiled()
def branched(
    v_n: Row, half: float, gap: float, side_n: Side, enough: float, most: int
) -> tuple[float, bool]:
    """Try each key in S, then out of it, large keys first; return (gap, complete).

    The largest key is in S: its complement is the same partition.
    """
    n, rest_n = v_n.size, np.append(np.cumsum(v_n[::-1])[::-1], 0.0)
    inside_n = np.zeros(n + 1, np.uint8)
    # One gap per level, not one that is added to and subtracted from: that drifts.
    gap_n = np.empty(n + 1)
    inside_n[0], gap_n[0], gap_n[1], k = 1, half, half - v_n[0], 1
    for _ in range(most):
        left = gap_n[k]
        if 0.0 < left < rest_n[k]:
            inside_n[k], gap_n[k + 1] = 1, left - v_n[k]
            k += 1
            continue
        end = left - rest_n[k] if left > 0.0 else left
        if abs(end) < abs(gap):
            gap = end
            for i in range(n):
                side_n[i] = inside_n[i] if i < k else left > 0.0
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
def _sink(heap_n: Row, key_n: Bits, size: int) -> None:
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
    """Write Karmarkar and Karp's partition into ``side_n``; return its gap."""
    n = v_n.size
    heap_n, key_n = np.empty(n), np.empty(n, np.int64)
    stays_n, leaves_n = np.empty(n, np.int64), np.empty(n, np.int64)
    for k in range(n):  # sorted from large to small is a heap
        heap_n[k], key_n[k] = v_n[k], k
    for step in range(n - 1):
        first, first_key, size = heap_n[0], key_n[0], n - step
        heap_n[0], key_n[0] = heap_n[size - 1], key_n[size - 1]
        _sink(heap_n, key_n, size - 1)
        stays_n[step], leaves_n[step] = first_key, key_n[0]
        heap_n[0], key_n[0] = first - heap_n[0], first_key
        _sink(heap_n, key_n, size - 1)
    side_n[key_n[0]] = 0
    for step in range(n - 2, -1, -1):
        side_n[leaves_n[step]] = 1 - side_n[stays_n[step]]
    return float(heap_n[0] / 2)


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
    w_m, rest = np.empty(m), 0.0
    for k in range(v_n.size):
        if k < m:
            w_m[k] = v_n[k]
        else:
            rest += v_n[k]
    first, second = _subset_sums(w_m, 0), _subset_sums(w_m, 1)
    below, a, b, above, c, d = nearest_sums(first, second, half)
    trial_n = np.zeros(v_n.size, np.uint8)
    for which in range(3 if m < v_n.size else 2):
        if which == 1:
            a, b = c, d
        elif which == 2:
            _, a, b, _, _, _ = nearest_sums(first, second, half - rest / 2)
        trial = _completed(v_n, half, (a, b, m), trial_n)
        trial = swapped(v_n, trial, trial_n, enough)
        if abs(trial) < abs(gap):
            gap = trial
            for k in range(v_n.size):
                side_n[k] = trial_n[k]
    return gap, max(min(half - rest - below, above - half), 0.0)


@compiled()
def reshuffled(v_n: Row, gap: float, side_n: Side, chosen_m: Bits) -> float:
    """Reassign the chosen keys at once, all others held; return the gap."""
    move_m = np.empty(chosen_m.size)
    for i in range(chosen_m.size):
        k = chosen_m[i]
        move_m[i] = -v_n[k] if side_n[k] else v_n[k]
    first, second = _subset_sums(move_m, 0), _subset_sums(move_m, 1)
    below, a, b, above, c, d = nearest_sums(first, second, gap)
    nearest = below
    if above - gap < gap - below:
        nearest, a, b = above, c, d
    if abs(gap - nearest) >= abs(gap):
        return gap
    for i in range(chosen_m.size):
        side_n[chosen_m[i]] ^= ((b if i % 2 else a) >> np.int64(i // 2)) & 1
    return gap - nearest


@compiled()
def _visits(m: int) -> int:
    """Return about how much work all subsets of m keys are."""
    return 20 << (m // 2)


@compiled()
def _improved(
    v_n: Row, gap: float, side_n: Side, enough: float, work: int
) -> tuple[float, int]:
    """Differencing, then reshuffling of keys of every size and of small keys."""
    trial_n = np.empty(v_n.size, np.uint8)
    trial = swapped(v_n, differenced(v_n, trial_n), trial_n, enough)
    if abs(trial) < abs(gap):
        gap = trial
        for k in range(v_n.size):
            side_n[k] = trial_n[k]
    for m in _NEIGHBOURS:
        chosen_m, step = np.empty(m, np.int64), v_n.size // m
        for attempt in range(2 * min(step, 3)):
            if abs(gap) <= enough or _visits(m) > work:
                return gap, work
            # Every step-th key, so of all sizes; and the smallest that were not yet.
            for i in range(m):
                last = v_n.size - m * (attempt // 2 + 1)
                chosen_m[i] = last + i if attempt % 2 else i * step + attempt // 2
            gap = reshuffled(v_n, gap, side_n, chosen_m)
            work -= _visits(m)
    return gap, work


@compiled()
def partition(
    v_n: Row, half: float, gap: float, side_n: Side, options: tuple[float, float, int]
) -> tuple[float, float]:
    """Return (gap, proven): a partition with that gap; no |gap| is below ``proven``."""
    enough, proven, work = options
    rounding = 4 * v_n.size * 2.0**-53 * half
    proven = max(proven, lattice_gap(v_n, half, enough))
    if abs(gap) - proven <= rounding:
        return gap, proven
    gap, complete = branched(v_n, half, gap, side_n, enough, _BRANCHES * v_n.size)
    if complete or abs(gap) <= enough:
        return gap, abs(gap) if complete else 0.0
    first = v_n.size if v_n.size <= _COMPLETE else DEPTHS[0]
    if v_n.size > _COMPLETE:
        gap, work = _improved(v_n, gap, side_n, enough, work - _visits(first))
        work += _visits(first)
    for depth in DEPTHS:
        m = min(max(depth, first), v_n.size)
        if abs(gap) <= max(enough, proven + rounding) or _visits(m) > work:
            break
        gap, bound = searched(v_n, half, gap, side_n, enough, m)
        proven, work = max(proven, bound), work - _visits(m)
        if m == v_n.size:
            break
    return gap, proven


@compiled()
def search_rows(
    v_Nn: Row, side_Nn: Side, bounds_N3: Row, enough: float, effort: float
) -> None:
    """Search rows further: improve their bounds, gaps and subsets where it helps."""
    for i in range(v_Nn.shape[0]):
        n, total = v_Nn.shape[1], 0.0
        while v_Nn[i, n - 1] == 0.0:
            n -= 1
        v_n, side_n = v_Nn[i, :n], side_Nn[i, :n]
        for k in range(n):
            total += v_n[k]
        work = _visits(n) if n <= _COMPLETE else _LEAST_WORK + _WORK_PER_KEY * n
        proven = np.sqrt(max(1.0 - bounds_N3[i, 1], 0.0)) * total / 2
        options = (enough * total, proven, int(effort * work))
        gap, proven = partition(v_n, total / 2, bounds_N3[i, 2], side_n, options)
        low, high = bounds_of(v_n, side_n, gap, proven)
        bounds_N3[i, 0] = max(bounds_N3[i, 0], low)
        bounds_N3[i, 1] = min(bounds_N3[i, 1], high)
        bounds_N3[i, 2] = gap
