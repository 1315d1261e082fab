"""The last steps for one sorted row, until its gap is closed or proven.

Axes, in this file:  n visible key, sorted from large to small · m key in a search ·
s subset sum of one half of these. Signs as in ``steps``. Work is counted in visits of
a key or of a sum, about a nanosecond each; a row that used up its share stays an
interval. Derivations: docs/theta-kernels.md.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.compiled import compiled
from equipoise.numerics.rows.steps import (
    Row,
    Side,
    bounds_of,
    counted,
    exact_sum,
    kept,
    largest_first,
    swapped,
)
from equipoise.numerics.rows.window import theta

Bits = NDArray[np.int64]
Half = tuple[Row, Bits, int]
# Visits at effort 1: with them no row takes more than about twenty times as long as an
# ordinary one. Rows of up to 26 keys are complete: with so few of them, ordinary rows
# are searched to the end too.
_WORK, _COMPLETE = 60_000, 26
# Keys in a complete search: 2¹⁰ to 2²⁰ sums in each half.
DEPTHS = (20, 26, 33, 40)


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
