"""θ of one float32 row, unsorted: closed forms, a fill, subsets of twelve keys.

Axes, in this file:  K key · m large key · s, t subset sums of some keys and of others.
Subset sums are in float32 and compared as bit patterns, because integer minima
vectorise; what they cannot tell apart is decided in float64. Derivations:
docs/theta-kernels.md.

Kernels take whole arrays and bounds, not slices, and write loops out: each slice, sum
and ``max`` costs a tenth of a second to compile, and each level of calls compiles all
that is below it once more. Counters start as ``np.int64``: with a literal 0 numba
compiles the functions they are passed to once more. An index that is no counter of a
``range`` is cast to ``np.uintp``: numba would ask of each whether it is negative, and
such loops do not vectorise.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.compiled import bits, inner, single

Row = NDArray[np.float64]
Singles = NDArray[np.float32]
Ends = tuple[Any, Any]
Facts = tuple[Any, float, float]
"""Where the keys of a row end, their mass, and the gap that is small enough."""
# An upper bound that no row has: the row needs the next steps of the ladder.
OPEN = -1.0
# The inner list: a constant length, or the loops would not be unrolled. Row i of the
# table says which of its sums have key i.
_INNER = 6
_SUMS = 1 << _INNER
_HAS = (np.arange(_SUMS) >> np.arange(_INNER)[:, None] & 1).astype(np.float32)
# Rows of so few keys are searched completely: the largest is in S, 2⁹ sums are outside.
FEW = _INNER + 10
# Keys that close most rows.
WINDOW = 2 * _INNER
# Sums of up to fifteen keys in float32, and two differences, are off by less than this
# share of the mass: sixteen roundings of half a unit in the last place.
_SLACK = 1.25 * 2.0**-20
# Lists start with every other key taken: sums of half of the keys lie densest.
_ALTERNATE = 0b101010101
# A key above this many times the mean, and above 1/32 of the mass, is large.
_LARGE, _WIDTH = 4.0, 32
# Each takes keys a quarter as large as large ones.
_ATTEMPTS = 4
# The room begins with the sums of six keys, and of six others. Then follow how near
# they come, and the keys. One array: each more is counted in and out at every call.
_OTHERS, _NEAR, _KEYS = _SUMS, 2 * _SUMS, 2 * _SUMS + (1 << 9)
_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@inner()
def theta(inside: float, outside: float) -> float:
    """Return 4ab/(a+b)², written 1 - ((a-b)/(a+b))² where that rounds less."""
    total = inside + outside
    if 4.0 * inside > total and 4.0 * outside > total:
        off = (inside - outside) / total
        return 1.0 - off * off
    return 4.0 * (inside / total) * (outside / total)


@inner(reorder=True)
def _list_sums(room: Singles, at: int, to: int) -> None:
    """Write the sums of all subsets of six keys."""
    a, b, c = room[at], room[at + 1], room[at + 2]
    d, e, f = room[at + 3], room[at + 4], room[at + 5]
    for t in range(_SUMS):
        some = a * _HAS[0, t] + b * _HAS[1, t] + c * _HAS[2, t]
        room[to + t] = some + (d * _HAS[3, t] + e * _HAS[4, t] + f * _HAS[5, t])


@inner(reorder=True)
def _least(left: np.float32, room: Singles) -> Any:
    """Return the distance to the nearest sum of the inner list."""
    near = _INFINITY
    for t in range(_SUMS):
        away = bits(left - room[t]) & _MAGNITUDE
        near = away if away < near else near
    return single(near)


@inner()
def _without(room: Singles, ends: Ends, chosen: Any, target: float) -> float:
    """Return the target less the chosen keys of those between ``ends``."""
    for k in range(ends[0], ends[1]):
        if chosen >> (k - ends[0]) & 1:
            target -= room[_KEYS + k]
    return target


@inner()
def _decided(
    room: Singles, ends: Ends, aim: tuple[float, np.float32, Any, Any]
) -> float:
    """Return target - s for the nearest sum of those that are near in float32."""
    target, least, begin, end = aim
    best = np.inf
    for s in range(begin, end):
        if room[_NEAR + s] <= least:
            left = np.float32(_without(room, ends, s << _INNER, target))
            for t in range(_SUMS):
                if abs(left - room[t]) <= least:
                    off = _without(room, ends, s << _INNER | t, target)
                    best = off if abs(off) < abs(best) else best
    return best


@inner()
def nearest(
    room: Singles, ends: Ends, goal: tuple[float, float, float], signed: bool
) -> tuple[float, bool]:
    """Return target - s for a subset sum s, and if no other is nearer the target.

    Args:
        room: See ``scratch``; it holds the keys.
        ends: The first key, and the one after the last: at most ``FEW`` - 1 of them.
        goal: The target; a mass that neither it nor the sum of the keys exceeds; and
            what is near enough: at the first sum within it the search stops, unproven.
        signed: If not, a sum that is near enough gives a bound on its distance only.
    """
    first, last = ends
    target, mass, enough = goal
    for k in range(_KEYS + last, _KEYS + first + WINDOW):
        room[k] = np.float32(0)
    _list_sums(room, _KEYS + first, 0)
    _list_sums(room, _KEYS + first + _INNER, _OTHERS)
    others = last - first - _INNER
    begin, end = np.int64(0), np.int64(1) << others if others > 0 else np.int64(1)
    slack, least, proven = np.float32(_SLACK * mass), np.float32(np.inf), True
    for i in range(end):
        s = i ^ (_ALTERNATE & (end - 1))
        left = _without(room, (first + WINDOW, last), s >> _INNER, target)
        near = _least(np.float32(left) - room[_OTHERS + (s & (_SUMS - 1))], room)
        room[_NEAR + s] = near
        if near < least:
            least = near
            if near + slack <= enough:
                if not signed:
                    return np.float64(near + slack), False
                begin, end, proven = s, s + 1, False
                break
    best = _decided(room, ends, (target, np.float32(least + 2 * slack), begin, end))
    return best, proven


def scratch(keys: int) -> Singles:
    """Return room for sums and for so many keys."""
    return np.empty(_KEYS + keys + WINDOW, np.float32)


@inner(reorder=True)
def _heavy(p_K: Singles, stop: int, least: np.float32) -> tuple[Any, float]:
    """Return how many keys exceed ``least``, and their mass."""
    count, mass = np.int32(0), 0.0
    for k in range(stop):
        heavy = p_K[k] > least
        count += np.int32(heavy)
        mass += float(p_K[k]) if heavy else 0.0
    return count, mass


@inner()
def heaviest(p_K: Singles, stop: int, top: float, most: int) -> float:
    """Return the sum of the ``most`` largest keys, found by bisecting their bits."""
    # More than ``most`` keys exceed the value with bits low, no more that with high.
    low, high = np.int32(0), bits(np.float32(top))
    mass, missing = 0.0, most
    while high - low > 1:
        middle = np.int32((low + high) // 2)
        count, above = _heavy(p_K, stop, single(middle))
        if count > most:
            low = middle
        else:
            high, mass, missing = middle, above, most - count
    return mass + missing * float(single(high))


@inner()
def _gathered(
    p_K: Singles, stop: int, least: np.float32, room: Singles
) -> tuple[Any, float]:
    """Copy the keys above ``least``, largest first; return how many, and their mass."""
    m, mass = np.int64(0), 0.0
    for k in range(stop):
        if p_K[k] > least:
            at = _KEYS + m
            while at > _KEYS and room[at - 1] < p_K[k]:
                room[at] = room[at - 1]
                at -= 1
            room[at] = p_K[k]
            mass += p_K[k]
            m += 1
    return m, mass


@inner()
def _first_small(
    p_K: Singles, stop: int, least: np.float32, room: Singles
) -> tuple[Any, Any, float]:
    """Copy the first twelve small keys; return where they end, how many, their mass."""
    w, mass, first = np.int64(0), 0.0, np.int64(0)
    while first < stop and w < WINDOW:
        p = p_K[np.uintp(first)]
        if 0 < p <= least:
            room[_KEYS + w] = p
            mass += p
            w += 1
        first += 1
    return first, w, mass


@inner(reorder=True)
def _filled(
    p_K: Singles, ends: Ends, least: np.float32, gaps: tuple[float, float]
) -> tuple[float, Any]:
    """Take small keys in order while more than the second gap is missing.

    Returns the gap, and where the keys taken end: the row's end if they lie apart.
    """
    k, stop = ends
    gap, left = gaps
    together = True
    while k + 8 <= stop:  # wider blocks, or sums in float64, take twice as long
        block = np.float32(0)
        for i in range(8):
            x = p_K[np.uintp(k + i)]
            block += x if x <= least else np.float32(0)
        if gap - block < left:
            break
        gap -= float(block)
        k += 8
    while k < stop:
        x = p_K[np.uintp(k)]
        if x <= least:
            if gap - x >= left:
                gap -= float(x)
            elif gap <= 2 * left:  # within reach of the window
                return gap, k if together else stop
            else:
                together = False
        k += 1
    return gap, stop


@inner()
def _exchanged(
    p_K: Singles, ends: tuple[Any, Any, Any], least: np.float32, gap: float
) -> float:
    """Exchange the next key in S for the next one outside, where that helps."""
    k, middle, stop = ends
    away = middle - k
    while k < middle and k + away < stop:
        out, into = p_K[k], p_K[k + away]
        if 0 < out <= least and 0 < into <= least:
            left = gap - (np.float64(into) - np.float64(out))
            gap = left if abs(left) < abs(gap) else gap
        k += 1
    return gap


@inner()
def _attempt(
    p_K: Singles, facts: Facts, large: tuple[np.float32, float], room: Singles
) -> tuple[float, bool, Any]:
    """Deal the large keys, then the others; return the gap, if it is proven, how many.

    Few large keys are dealt in all ways, towards half of what the others leave; the
    others are filled in order, and all subsets of twelve of them close the gap.
    """
    stop, total, enough = facts
    least, top = large
    gap, m, mass = total / 2, np.int64(0), 0.0
    if least < top:
        m, mass = _gathered(p_K, stop, least, room)
    if 0 < m <= (WINDOW if least > 0 else FEW):
        rest = (total - mass) / 2 if least > 0 else 0.0
        goal = (gap - rest - room[_KEYS], total, rest / 2 if rest > 0 else enough)
        off, proven = nearest(room, (np.int64(1), m), goal, rest > 0)
        if abs(off) >= rest:
            return abs(off) - rest, proven, m
        gap = off + rest
    else:
        for k in range(_KEYS, _KEYS + m):  # where they fit, largest first
            gap -= room[k] if room[k] <= gap else 0.0
    first, w, mass = _first_small(p_K, stop, least, room)
    gap, middle = _filled(p_K, (first, stop), least, (gap, mass / 2))
    goal = (gap, mass if mass > gap else gap, enough)
    gap, _ = nearest(room, (np.int64(0), w), goal, False)
    if abs(gap) > enough:
        gap = _exchanged(p_K, (first, middle, stop), least, gap)
    return gap, False, m


@inner()
def row_gap(
    p_K: Singles, facts: Facts, count: Any, top: float, room: Singles
) -> tuple[float, bool]:
    """Return the gap of a set, |gap| ≤ enough when it closed, and if it is proven.

    All of a few keys are large. Otherwise more and more of them are, as long as a few
    keys matter most. An odd number of nearly equal keys has no half, which is a proof.
    """
    stop, total, enough = facts
    share = _LARGE / count if count < _LARGE * _WIDTH else 1 / _WIDTH
    share = share if count > FEW else 0.0
    best = total / 2
    for _ in range(_ATTEMPTS):
        least = np.float32(total * share)
        gap, proven, m = _attempt(p_K, facts, (least, top), room)
        if proven or abs(gap) <= enough or share == 0.0:
            return gap, proven
        best = gap if abs(gap) < abs(best) else best
        if least >= top or m >= _WIDTH:
            break
        share /= 4
    if count % 2 == 1:
        minority = heaviest(p_K, stop, top, count // 2)
        if 2 * minority <= total:
            return total / 2 - minority, True
    return best, False


@inner()
def row_bounds(
    p_K: Singles, facts: Facts, keys: tuple[float, float, Any, Any], room: Singles
) -> tuple[float, float]:
    """Return θ's bounds of a row; the upper is ``OPEN`` where none is known.

    ``p_K`` holds masses on any scale, hidden keys are 0; ``keys`` are the mass below
    the largest key, that key, how many equal it, and how many are above 0.
    """
    _, total, enough = facts
    below, top, tops, count = keys
    rest, gap, proven = below + (tops - 1) * top, 0.0, True
    if not rest > top:  # also NaN, which stays one
        value = theta(top, rest)
    elif below == 0.0:  # all alike
        value = theta(np.floor(tops / 2), tops - np.floor(tops / 2))
    else:
        gap, proven = row_gap(p_K, facts, count, top, room)
        value = theta(total / 2 + gap, total / 2 - gap)
    if proven:
        return value, value
    return value, 1.0 if abs(gap) <= enough else OPEN
