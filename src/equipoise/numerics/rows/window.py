"""θ of float32 rows, unsorted: closed forms, a fill in order, subsets of twelve keys.

Axes, in this file:  N row · K key · n key, compacted · m large key · C column of facts
· b subset sum of six keys · a subset sum of the others.
For an instrument that reads every row of every head: no row is sorted and no set is
written down. Large keys are dealt, most others are taken in order until half of the
mass is nearly reached, and the subsets of twelve keys close what is left. The loop over
subsets is in float32 and on bit patterns, because integer minima vectorise; what it
cannot tell apart is decided in float64.

Kernels take whole arrays and bounds, not slices, and write loops out: each slice, sum
and ``max`` costs a tenth of a second to compile, and so does each level of calls for
everything below it. Counters start as ``np.int64``: with a literal 0 numba compiles the
functions they are passed to once more.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.rows.compiled import compiled

Row = NDArray[np.float64]
Singles = NDArray[np.float32]
Ends = tuple[Any, Any]
Room = tuple[Row, Row, Row, Singles, Singles, Singles]
# What is known of a row: the mass below the largest key, that key, how many keys equal
# it (0 for a row that is not sound), how many are above 0, and where they end.
BELOW, TOP, TOPS, SOME, STOP = range(5)
FACTS = 5
# An upper bound that no row has: the row needs the next steps of the ladder.
OPEN = -1.0
# The inner list: a constant length, or the loop would not be unrolled.
_INNER = 6
_SUMS = 1 << _INNER
# Large keys that are dealt by all subsets: the largest is in S, 2⁹ sums are outside.
FEW = _INNER + 10
# Keys that close most rows.
WINDOW = 2 * _INNER
# Float32 sums and differences are off by less than this share of the mass.
_SLACK = 2.0**-21
# Lists start with every other key taken: sums of half of the keys lie densest.
_ALTERNATE = 0b101010101
# A key above this many times the mean, and above 1/32 of the mass, is large.
_LARGE, _WIDTH = 4.0, 32
# Each takes keys a quarter as large as large ones.
_ATTEMPTS = 4
_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@compiled()
def theta(inside: float, outside: float) -> float:
    """Return 4ab/(a+b)², written 1 - ((a-b)/(a+b))² where that rounds less."""
    total = inside + outside
    if 4.0 * inside > total and 4.0 * outside > total:
        return 1.0 - ((inside - outside) / total) ** 2
    return 4.0 * (inside / total) * (outside / total)


@compiled()
def _summed(w_n: Row, first: int, stop: int, sum_s: Row, sum32_s: Singles) -> int:
    """Write all subset sums of some keys in both formats; return how many there are."""
    sum_s[0], count = 0.0, 1
    for k in range(first, stop):
        for s in range(count):
            sum_s[count + s] = sum_s[s] + w_n[k]
        count *= 2
    for s in range(count):
        sum32_s[s] = sum_s[s]
    return count


@compiled()
def _decided(target: float, outer: int, least: np.float32, room: Room) -> float:
    """Return the smallest of the differences that are near in float32, in float64."""
    _, a_s, b_s, _, _, near_s = room
    best = np.inf
    for s in range(outer):
        if near_s[s] <= least:
            for t in range(_SUMS):
                off = target - a_s[s] - b_s[t]
                best = off if abs(off) < abs(best) else best
    return best


@compiled()
def nearest(
    w_n: Row, ends: Ends, goal: tuple[float, float, float], room: Room
) -> tuple[float, bool]:
    """Return target - s for the subset sum s nearest the target, and if that is proven.

    Args:
        w_n: Of which the keys between ``ends`` are meant, at most ``FEW`` - 1.
        ends: The first key, and the one after the last.
        goal: The target; the mass that no entry and no partial sum exceeds; and what is
            near enough: at the first sum within it the search stops, unproven, and
            returns no more than a bound on its distance.
        room: Space for the lists of sums, see ``scratch``.
    """
    _, a_s, b_s, a32_s, b32_s, near_s = room
    first, last = ends
    target, mass, enough = goal
    middle = first + _INNER if last - first > _INNER else last
    for s in range(_summed(w_n, first, middle, b_s, b32_s), _SUMS):
        b_s[s], b32_s[s] = 0.0, np.float32(0)  # the empty set again
    outer = _summed(w_n, middle, last, a_s, a32_s)
    slack, least = np.float32(_SLACK * mass), np.float32(np.inf)
    for i in range(outer):
        s, near = i ^ (_ALTERNATE & (outer - 1)), _INFINITY
        left = np.float32(np.float32(target) - a32_s[s])
        for t in range(_SUMS):
            away = np.float32(left - b32_s[t]).view(np.int32) & _MAGNITUDE
            near = away if away < near else near
        near_s[s] = np.int32(near).view(np.float32)
        if near_s[s] < least:
            least = near_s[s]
            if least + slack <= enough:
                return float(least + slack), False
    best = _decided(target, outer, least + 2 * slack, room)
    return best, abs(best) > enough


@compiled()
def _quickly(w_n: Row, goal: tuple[float, float, float], room: Room) -> float:
    """Return how far at most a subset sum of twelve keys is from the target.

    Always three of the last six keys are taken, because then the sums of the others
    lie densest; infinity when none of eight such choices comes near enough. Loops of
    constant length and one list in float32: a third of what ``nearest`` needs.
    """
    target, mass, enough = goal
    b32_s = room[4]
    b32_s[0], b32_s[1] = np.float32(0), np.float32(w_n[0])
    for k in range(1, _INNER):
        key = np.float32(w_n[k])
        for s in range(1 << k):
            b32_s[(1 << k) + s] = b32_s[s] + key
    slack = np.float32(2 * _SLACK * mass)  # five more roundings than in ``nearest``
    for choice in range(8):
        left, near = target, _INFINITY
        for k in range(_INNER, _INNER + 3):
            left -= w_n[k + 3] if choice >> (k - _INNER) & 1 else w_n[k]
        for s in range(_SUMS):
            away = np.float32(np.float32(left) - b32_s[s]).view(np.int32) & _MAGNITUDE
            near = away if away < near else near
        off = np.int32(near).view(np.float32) + slack
        if off <= enough:
            return float(off)
    return np.inf


def scratch(keys: int) -> Room:
    """Return room for a row, for two lists of sums in two formats, and what is near."""
    outer = 1 << (FEW - 1 - _INNER)
    a, b, near = np.empty(outer), np.empty(_SUMS), np.empty(outer, np.float32)
    a32, b32 = near.copy(), np.empty(_SUMS, np.float32)
    return np.empty(max(keys, WINDOW)), a, b, a32, b32, near


@compiled(reorder=True)
def _heavy(p_K: Singles, stop: int, least: np.float32) -> tuple[Any, float]:
    """Return how many keys exceed ``least``, and their mass."""
    count, mass = np.int32(0), 0.0
    for k in range(stop):
        heavy = p_K[k] > least
        count += np.int32(heavy)
        mass += float(p_K[k]) if heavy else 0.0
    return count, mass


@compiled()
def heaviest(p_K: Singles, stop: int, top: float, most: int) -> float:
    """Return the sum of the ``most`` largest keys, found by bisecting their bits."""
    # More than ``most`` keys exceed the value with bits low, no more that with high.
    low, high = 0, int(np.float32(top).view(np.int32))
    mass, missing = 0.0, most
    while high - low > 1:
        middle = (low + high) // 2
        count, above = _heavy(p_K, stop, np.int32(middle).view(np.float32))
        if count > most:
            low = middle
        else:
            high, mass, missing = middle, above, most - count
    return mass + missing * float(np.int32(high).view(np.float32))


@compiled()
def _dealt(
    p_K: Singles, facts: tuple[int, float, float], least: np.float32, room: Room
) -> tuple[float, bool]:
    """Deal the large keys; return the gap to be filled by the others, and if it is all.

    A few are dealt so that filling can go either way: the largest is in S, and p(S) is
    nearest ½(1 - r), where r is the mass of the others. If that is off by more than
    r/2, the others go all to one side, and the rest of the gap is proven: no other deal
    of the large keys is nearer. Many are dealt largest first, where they fit.
    """
    stop, total, enough = facts
    v_m, m, mass = room[0], np.int64(0), 0.0
    for k in range(stop):
        if p_K[k] > least:
            at = m
            while at > 0 and v_m[at - 1] < p_K[k]:
                v_m[at] = v_m[at - 1]
                at -= 1
            v_m[at] = p_K[k]
            mass += p_K[k]
            m += 1
    gap = total / 2
    if 0 < m <= FEW:
        rest = (total - mass) / 2 if least > 0 else 0.0
        goal = (gap - rest - v_m[0], total, enough if rest == 0 else 0.0)
        off, proven = nearest(v_m, (np.int64(1), m), goal, room)
        if abs(off) >= rest:
            return abs(off) - rest, proven or rest > 0
        return off + rest, False
    for k in range(m):
        gap -= v_m[k] if v_m[k] <= gap else 0.0
    return gap, False


@compiled(reorder=True)
def _light(p_K: Singles, start: int, least: np.float32) -> float:
    """Return the mass of the keys up to ``least`` in one block."""
    total = 0.0
    for k in range(start, start + _WIDTH):
        total += float(p_K[k]) if p_K[k] <= least else 0.0
    return total


@compiled()
def _filled(
    p_K: Singles, ends: Ends, least: np.float32, gaps: tuple[float, float]
) -> tuple[float, int]:
    """Take small keys in order while more than the second gap is missing.

    Returns the gap, and where the keys taken end; the size of the row where they do not
    lie together, because a key that was too large had to be left out.
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


@compiled()
def _windowed(
    p_K: Singles,
    facts: tuple[int, float, float],
    least: np.float32,
    gap: float,
    room: Room,
) -> float:
    """Fill the small keys, and search the subsets of the first twelve; return the gap.

    If that is not enough, the next key in S is exchanged for the next one outside
    whenever that helps: near-uniform rows need many small corrections of one sign.
    """
    stop, total, enough = facts
    v_n, w, mass, first = room[0], np.int64(0), 0.0, np.int64(0)
    while first < stop and w < WINDOW:
        if 0 < p_K[first] <= least:
            v_n[w] = p_K[first]
            mass += p_K[first]
            w += 1
        first += 1
    gap, middle = _filled(p_K, (first, stop), least, (gap, mass / 2))
    if w == WINDOW:
        near = _quickly(v_n, (gap, total, enough), room)
        if near <= enough:
            return near
    gap, _ = nearest(v_n, (np.int64(0), w), (gap, total, enough), room)
    k = first
    while abs(gap) > enough and k < middle and middle + k - first < stop:
        out, into = p_K[k], p_K[middle + k - first]
        if 0 < out <= least and 0 < into <= least:
            left = gap - (float(into) - float(out))
            gap = left if abs(left) < abs(gap) else gap
        k += 1
    return gap


@compiled()
def _gap(
    p_K: Singles, facts: tuple[int, float, float], count: int, top: float, room: Room
) -> tuple[float, bool]:
    """Return the gap of a set, |gap| ≤ enough when it closed, and if it is proven.

    All of a few keys are large. Otherwise more and more of them are, as long as a few
    keys matter most. An odd number of nearly equal keys has no half: if the larger half
    of all but one of them weighs no more than the rest, every set of so few keys weighs
    less, and the gap is proven.
    """
    stop, total, enough = facts
    share = _LARGE / count if count < _LARGE * _WIDTH else 1 / _WIDTH
    share = share if count > FEW else 0.0
    best = total / 2
    for _ in range(_ATTEMPTS):
        least = np.float32(total * share)
        gap, proven = _dealt(p_K, facts, least, room)
        if not proven and share > 0.0:
            gap = _windowed(p_K, facts, least, gap, room)
        if proven or abs(gap) <= enough or share == 0.0:
            return gap, proven
        best = gap if abs(gap) < abs(best) else best
        if least >= top or _heavy(p_K, stop, least)[0] >= _WIDTH:
            break
        share /= 4
    if count % 2 == 1:
        minority = heaviest(p_K, stop, top, count // 2)
        if 2 * minority <= total:
            return total / 2 - minority, True
    return best, False


@compiled()
def close(
    p_NK: Singles, fact_NC: Row, enough: float, bounds_N2: Row, room: Room
) -> None:
    """Write θ's interval of every row; the upper bound is ``OPEN`` where none is known.

    Args:
        p_NK: Masses on any scale; hidden keys are 0.
        fact_NC: What is known of each row: its columns are named above.
        enough: Share of the mass that may be missing from a half.
        bounds_N2: The result. A lower bound is attained by a subset of keys.
        room: See ``scratch``.
    """
    for i in range(p_NK.shape[0]):
        below, top, tops = fact_NC[i, BELOW], fact_NC[i, TOP], fact_NC[i, TOPS]
        rest, total = below + (tops - 1) * top, below + tops * top
        if tops == 0:
            inside, outside, high = 0.0, 1.0, OPEN
        elif not rest > top:  # also NaN, which stays one
            inside, outside, high = top, rest, 0.0
        elif below == 0.0:
            inside, high = np.floor(tops / 2), 0.0
            outside = tops - inside
        else:
            facts = (int(fact_NC[i, STOP]), total, enough * total)
            gap, proven = _gap(p_NK[i], facts, int(fact_NC[i, SOME]), top, room)
            inside, outside = total / 2 + gap, total / 2 - gap
            high = 0.0 if proven else 1.0 if abs(gap) <= enough * total else OPEN
        value = theta(inside, outside)
        bounds_N2[i, 0] = value
        bounds_N2[i, 1] = value if high == 0.0 else high
