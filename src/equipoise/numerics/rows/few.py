"""Every subset of a few keys, by brute force in vector registers.

Axes, in this file:  n key · b subset sum of six keys · a subset sum of the others.
Two short lists of subset sums meet in a double loop without branches: 2¹² subsets take
half a microsecond, less than sorting them would. The loop is in float32 and on bit
patterns, because integer minima vectorise; what it cannot tell apart is then decided in
float64.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.rows.compiled import compiled
from equipoise.numerics.rows.sorted_rows import Row

# The inner list: a constant length, or the loop would not be unrolled.
_INNER = 6
_SUMS = 1 << _INNER
# Keys that are searched completely: the largest is in S, and 2⁹ sums are outside.
FEW = _INNER + 10
# Keys that close most rows.
WINDOW = 2 * _INNER
# Float32 sums and differences are off by less than this share of the mass.
_SLACK = 2.0**-21
_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)

Sums32 = NDArray[np.float32]
Lists = tuple[Row, Row, Sums32, Sums32, Sums32]


@compiled()
def lists() -> Lists:
    """Return room for the sums of both lists, in two formats, and for what is near."""
    outer = 1 << (FEW - 1 - _INNER)
    return (
        np.empty(outer),
        np.empty(_SUMS),
        np.empty(outer, np.float32),
        np.empty(_SUMS, np.float32),
        np.empty(outer, np.float32),
    )


@compiled()
def _summed(w_n: Row, sum_s: Row, sum32_s: Sums32) -> int:
    """Write all subset sums of some keys; return how many there are."""
    sum_s[0], count = 0.0, 1
    for k in range(w_n.size):
        for s in range(count):
            sum_s[count + s] = sum_s[s] + w_n[k]
        count *= 2
    for s in range(count):
        sum32_s[s] = sum_s[s]
    return count


@compiled()
def _near(left: np.float32, b32_s: Sums32) -> np.float32:
    """Return the distance from ``left`` to the nearest of the inner sums."""
    near = _INFINITY
    for s in range(_SUMS):
        near = min(near, np.float32(left - b32_s[s]).view(np.int32) & _MAGNITUDE)
    return np.int32(near).view(np.float32)


@compiled()
def _six(w_n: Row, b32_s: Sums32) -> None:
    """Write all sums of the first six keys, in float32: constant loops, no branch."""
    b32_s[0], b32_s[1] = np.float32(0), np.float32(w_n[0])
    for k in range(1, _INNER):
        key = np.float32(w_n[k])
        for s in range(1 << k):
            b32_s[(1 << k) + s] = b32_s[s] + key


@compiled()
def quickly(w_n: Row, target: float, mass: float, enough: float, room: Lists) -> float:
    """Return how far at most a subset sum of twelve keys is from the target.

    Always three of the last six keys are taken, because then the sums of the others
    lie densest; infinity when none of eight such choices comes within ``enough``.
    """
    b32_s = room[3]
    _six(w_n, b32_s)
    slack = np.float32(2 * _SLACK * mass)  # five more roundings than in ``nearest``
    first_3, second_3 = w_n[_INNER : _INNER + 3], w_n[_INNER + 3 : WINDOW]
    for choice in range(8):
        away = target
        for k in range(3):
            away -= second_3[k] if choice >> k & 1 else first_3[k]
        near = _near(np.float32(away), b32_s) + slack
        if near <= enough:
            return float(near)
    return np.inf


@compiled()
def _exactly(left: float, b_s: Row) -> float:
    """Return left - b for the nearest of the inner sums, in float64."""
    best = np.inf
    for s in range(_SUMS):
        if abs(left - b_s[s]) < abs(best):
            best = left - b_s[s]
    return best


@compiled()
def nearest(
    w_n: Row, target: float, mass: float, enough: float, room: Lists
) -> tuple[float, bool]:
    """Return target - s for the subset sum s nearest the target, and if that is proven.

    Stops, unproven, at the first sum within ``enough``, and then returns no more than
    a bound on its distance. At most ``FEW`` - 1 keys; no entry and no partial sum
    exceeds ``mass``.
    """
    a_s, b_s, a32_s, b32_s, near_s = room
    inner = min(w_n.size, _INNER)
    count = _summed(w_n[:inner], b_s, b32_s)
    b_s[count:], b32_s[count:] = 0.0, 0.0  # the empty set again
    outer = _summed(w_n[inner:], a_s, a32_s)
    slack, least = np.float32(_SLACK * mass), np.float32(np.inf)
    for s in range(outer):
        near_s[s] = _near(np.float32(np.float32(target) - a32_s[s]), b32_s)
        if near_s[s] < least:
            least = near_s[s]
            if least + slack <= enough:
                return float(least + slack), False
    best = np.inf
    for s in range(outer):
        if near_s[s] <= least + 2 * slack:
            exact = _exactly(target - a_s[s], b_s)
            if abs(exact) < abs(best):
                best = exact
    return best, abs(best) > enough
