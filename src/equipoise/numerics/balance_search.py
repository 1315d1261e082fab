"""The deep end of the ladder: one row, sorted, until its gap is closed or proven.

Axes, in this file:  n visible key, sorted from large to small · m key in a search.
Signs as in ``balance_sorted``: gap = ½ Σp - p(S), side 1 where a key is in S.
"""

import numpy as np

from equipoise.numerics.balance_branch import branched
from equipoise.numerics.balance_compile import compiled
from equipoise.numerics.balance_differencing import differenced
from equipoise.numerics.balance_halves import nearest_sums
from equipoise.numerics.balance_proofs import cardinality_gap, lattice_gap
from equipoise.numerics.balance_sorted import (
    Row,
    Side,
    largest_first,
    swapped,
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
