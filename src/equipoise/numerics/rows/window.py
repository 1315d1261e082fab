"""θ of one float32 row, unsorted: closed forms, a fill, subsets of twelve keys.

Axes, in this file:  K key · m large key · s, t subset sums of some keys and of others.
Subset sums are in float32 and compared as bit patterns, because integer minima
vectorise; what they cannot tell apart is decided in float64. Derivations:
docs/theta-kernels.md.

Kernels take whole arrays and bounds, not slices, and write loops out: each slice, sum
and ``max`` costs a tenth of a second to compile, and so does each level of calls for
everything below it. Counters start as ``np.int64``: with a literal 0 numba compiles the
functions they are passed to once more.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.compiled import inner

Row = NDArray[np.float64]
Singles = NDArray[np.float32]
Ends = tuple[Any, Any]
Masses = tuple[float, float]
"""The mass below the largest key, and that key."""
Counts = tuple[Any, Any, Any]
"""How many keys equal the largest, how many are above 0, and where they end."""
# An upper bound that no row has: the row needs the next steps of the ladder.
OPEN = -1.0
# The inner list: a constant length, or the loop would not be unrolled.
_INNER = 6
_SUMS = 1 << _INNER
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
# Where in the room two lists of sums and what is near begin, and the keys. One array: a
# tuple of four is counted in and out at every call, which takes longer than to use it.
_FIRST, _SECOND, _NEAR, _KEYS = 0, _SUMS, _SUMS + (1 << 9), _SUMS + (2 << 9)
_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@inner()
def theta(inside: float, outside: float) -> float:
    """Return 4ab/(a+b)², written 1 - ((a-b)/(a+b))² where that rounds less."""
    total = inside + outside
    if 4.0 * inside > total and 4.0 * outside > total:
        return 1.0 - ((inside - outside) / total) ** 2
    return 4.0 * (inside / total) * (outside / total)


@inner()
def _summed(room: Singles, ends: Ends, start: int) -> Any:
    """Write all subset sums of the keys between ``ends``; return how many there are."""
    count = np.int64(1)
    room[start] = np.float32(0)
    for k in range(ends[0], ends[1]):
        key = room[_KEYS + k]
        for s in range(start, start + count):
            room[count + s] = room[s] + key
        count *= 2
    return count


@inner(reorder=True)
def _least(left: np.float32, room: Singles) -> Any:
    """Return the distance to the nearest sum of the first list."""
    near = _INFINITY
    for t in range(_SUMS):
        away = np.float32(left - room[t]).view(np.int32) & _MAGNITUDE
        near = away if away < near else near
    return np.int32(near).view(np.float32)


@inner()
def _decided(
    room: Singles, ends: Ends, aim: tuple[float, np.float32, Any, Any]
) -> float:
    """Return target - s for the nearest sum of those that are near in float32."""
    first, last = ends
    target, least, begin, end = aim
    best = np.inf
    for s in range(begin, end):
        if room[_NEAR + s] <= least:
            left = np.float32(np.float32(target) - room[_SECOND + s])
            for t in range(_SUMS):
                if abs(left - room[t]) <= least:
                    off, chosen = target, s << _INNER | t
                    for k in range(first, last):
                        if chosen >> (k - first) & 1:
                            off -= room[_KEYS + k]
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
    middle = first + _INNER if last - first > _INNER else last
    for t in range(_summed(room, (first, middle), _FIRST), _SUMS):
        room[t] = np.float32(np.inf)
    begin, end = np.int64(0), _summed(room, (middle, last), _SECOND)
    slack, least = np.float32(_SLACK * mass), np.float32(np.inf)
    for i in range(end):
        s = i ^ (_ALTERNATE & (end - 1))
        near = _least(np.float32(np.float32(target) - room[_SECOND + s]), room)
        room[_NEAR + s] = near
        if near < least:
            least = near
            if near + slack <= enough:
                if not signed:
                    return np.float64(near + slack), False
                begin, end = s, s + 1
                break
    best = _decided(room, ends, (target, np.float32(least + 2 * slack), begin, end))
    return best, abs(best) > enough


def scratch(keys: Singles | int) -> Singles:
    """Return room for lists of sums and for so many keys, or these."""
    if isinstance(keys, int):
        return np.empty(_KEYS + max(keys, WINDOW), np.float32)
    return np.concatenate([scratch(0)[:_KEYS], keys])


@inner(reorder=True)
def _heavy(p_K: Singles, ends: Ends, least: np.float32) -> tuple[Any, float]:
    """Return how many keys exceed ``least``, and their mass."""
    count, mass = np.int32(0), 0.0
    for k in range(ends[0], ends[1]):
        heavy = p_K[k] > least
        count += np.int32(heavy)
        mass += float(p_K[k]) if heavy else 0.0
    return count, mass


@inner()
def heaviest(p_K: Singles, stop: int, top: float, most: int) -> float:
    """Return the sum of the ``most`` largest keys, found by bisecting their bits."""
    # More than ``most`` keys exceed the value with bits low, no more that with high.
    low, high = 0, int(np.float32(top).view(np.int32))
    mass, missing = 0.0, most
    while high - low > 1:
        middle = (low + high) // 2
        count, above = _heavy(p_K, (0, stop), np.int32(middle).view(np.float32))
        if count > most:
            low = middle
        else:
            high, mass, missing = middle, above, most - count
    return mass + missing * float(np.int32(high).view(np.float32))


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
def _dealt(
    p_K: Singles, facts: tuple[int, float, float], least: np.float32, room: Singles
) -> tuple[float, bool]:
    """Deal the large keys; return the gap left to the others, and if it is proven."""
    stop, total, enough = facts
    m, mass = _gathered(p_K, stop, least, room)
    gap = total / 2
    if m <= (WINDOW if least > 0 else FEW):
        rest = (total - mass) / 2 if least > 0 else 0.0
        goal = (gap - rest - room[_KEYS], total, rest / 2 if rest > 0 else enough)
        off, proven = nearest(room, (np.int64(1), m), goal, rest > 0)
        if abs(off) >= rest:
            return abs(off) - rest, proven
        return off + rest, False
    for k in range(_KEYS, _KEYS + m):
        gap -= room[k] if room[k] <= gap else 0.0
    return gap, False


@inner(reorder=True)
def _light(p_K: Singles, start: int, least: np.float32) -> float:
    """Return the mass of the keys up to ``least`` in one block."""
    total = 0.0
    for k in range(start, start + _WIDTH):
        total += float(p_K[k]) if p_K[k] <= least else 0.0
    return total


@inner()
def _filled(
    p_K: Singles, ends: Ends, least: np.float32, gaps: tuple[float, float]
) -> tuple[float, int]:
    """Take small keys in order while more than the second gap is missing.

    Returns the gap, and where the keys taken end: the row's end if they lie apart.
    """
    k, stop = ends
    gap, left = gaps
    together = True
    while k + _WIDTH <= stop:
        block = _light(p_K, k, least)
        if gap - block < left:
            break
        gap -= block
        k += _WIDTH
    while k < stop:
        if p_K[k] <= least:
            if gap - p_K[k] >= left:
                gap -= float(p_K[k])
            elif gap <= 2 * left:  # within reach of the window
                return gap, k if together else stop
            else:
                together = False
        k += 1
    return gap, stop


@inner()
def _windowed(
    p_K: Singles,
    facts: tuple[int, float, float],
    least: np.float32,
    gap: float,
    room: Singles,
) -> float:
    """Fill small keys, search subsets of the first twelve, exchange; return the gap."""
    stop, _, enough = facts
    w, mass, first = np.int64(0), 0.0, np.int64(0)
    while first < stop and w < WINDOW:
        if 0 < p_K[first] <= least:
            room[_KEYS + w] = p_K[first]
            mass += p_K[first]
            w += 1
        first += 1
    gap, middle = _filled(p_K, (first, stop), least, (gap, mass / 2))
    mass = mass if mass > gap else gap
    gap, _ = nearest(room, (np.int64(0), w), (gap, mass, enough), False)
    k = first
    while abs(gap) > enough and k < middle and middle + k - first < stop:
        out, into = p_K[k], p_K[middle + k - first]
        if 0 < out <= least and 0 < into <= least:
            left = gap - (np.float64(into) - np.float64(out))
            gap = left if abs(left) < abs(gap) else gap
        k += 1
    return gap


@inner()
def _gap(
    p_K: Singles, facts: tuple[int, float, float], count: int, top: float, room: Singles
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
        gap, proven = total / 2, False
        if least < top:
            gap, proven = _dealt(p_K, facts, least, room)
        if not proven and share > 0.0:
            gap = _windowed(p_K, facts, least, gap, room)
        if proven or abs(gap) <= enough or share == 0.0:
            return gap, proven
        best = gap if abs(gap) < abs(best) else best
        if least >= top or _heavy(p_K, (0, stop), least)[0] >= _WIDTH:
            break
        share /= 4
    if count % 2 == 1:
        minority = heaviest(p_K, stop, top, count // 2)
        if 2 * minority <= total:
            return total / 2 - minority, True
    return best, False


@inner()
def closed(
    p_K: Singles, masses: Masses, counts: Counts, enough: float, room: Singles
) -> tuple[float, float]:
    """Return θ's interval of a row; the upper bound is ``OPEN`` where none is known.

    Args:
        p_K: Masses on any scale; hidden keys are 0.
        masses, counts: What is known of the row, see their types.
        enough: Share of the mass that may be missing from a half.
        room: See ``scratch``.
    """
    below, top = masses
    tops, some, stop = counts
    rest, total = below + (tops - 1) * top, below + tops * top
    if not rest > top:  # also NaN, which stays one
        inside, outside, high = top, rest, 0.0
    elif below == 0.0:
        inside, high = np.floor(tops / 2), 0.0
        outside = tops - inside
    else:
        facts = (stop, total, enough * total)
        gap, proven = _gap(p_K, facts, some, top, room)
        inside, outside = total / 2 + gap, total / 2 - gap
        high = 0.0 if proven else 1.0 if abs(gap) <= enough * total else OPEN
    value = theta(inside, outside)
    return value, value if high == 0.0 else high
