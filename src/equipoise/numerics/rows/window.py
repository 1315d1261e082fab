"""θ of a row whose largest key is 1, without a witness: fill in order, search a window.

Axes, in this file:  K key · m large key · w key of the window.
For an instrument that reads every row of every head. Nothing is sorted and no set is
written down: large keys are dealt, most others are taken in order until half of the
mass is nearly reached, and the subsets of twelve keys close what is left.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.rows.compiled import compiled
from equipoise.numerics.rows.few import FEW, WINDOW, Lists, nearest, quickly
from equipoise.numerics.rows.fill import OPEN, WIDTH
from equipoise.numerics.rows.sorted_rows import Row, theta

Block = NDArray[np.float32]
Scratch = tuple[Row, Lists]
# A key above this many times the mean, and above 1/32 of the mass, is large.
_LARGE = 4.0
# Each takes keys a quarter as large as large ones.
_ATTEMPTS = 4
_ONE_BITS = 0x3F800000


@compiled()
def _visible(p_K: Block, v_n: Row) -> int:
    """Write the positive keys one after another; return how many."""
    n = 0
    for k in range(p_K.size):
        v_n[n] = p_K[k]
        n += p_K[k] > 0
    return n


@compiled()
def _large_keys(p_K: Block, least: np.float32, v_m: Row) -> int:
    """Write the keys above ``least``, largest first; return how many."""
    m = 0
    for k in range(p_K.size):
        if p_K[k] > least:
            at = m
            while at > 0 and v_m[at - 1] < p_K[k]:
                v_m[at] = v_m[at - 1]
                at -= 1
            v_m[at] = p_K[k]
            m += 1
    return m


@compiled()
def _dealt(v_m: Row, total: float, room: Lists) -> tuple[float, bool]:
    """Deal the large keys; return the gap to be filled by the others, and if it is all.

    A few are dealt so that filling can go either way: p(S) nearest ½(1 - r), where r is
    the mass of the others. If that is off by more than r/2, the others go all to one
    side, and the rest of the gap is proven: no other deal of the large keys is nearer.
    Many are dealt largest first, where they fit.
    """
    gap = total / 2
    if v_m.size <= WINDOW:
        half_rest = (total - v_m.sum()) / 2
        off, _ = nearest(v_m, gap - half_rest, total, 0.0, room)
        if abs(off) >= half_rest:
            return abs(off) - half_rest, True
        return off + half_rest, False
    for v in v_m:
        if v <= gap:
            gap -= v
    return gap, False


@compiled()
def _window(p_K: Block, least: np.float32, v_w: Row) -> int:
    """Take the first twelve small keys into the window; return where they end."""
    w = 0
    for k in range(p_K.size):
        if 0 < p_K[k] <= least:
            v_w[w] = p_K[k]
            w += 1
            if w == WINDOW:
                return k + 1
    v_w[w:WINDOW] = 0.0
    return p_K.size


@compiled(reorder=True)
def _block(p_c: Block, least: np.float32) -> float:
    total = 0.0
    for c in range(p_c.size):
        total += float(p_c[c]) if p_c[c] <= least else 0.0
    return total


@compiled()
def _filled(
    p_K: Block, least: np.float32, gap: float, left: float
) -> tuple[float, int]:
    """Take small keys in order while more than ``left`` is missing.

    Returns the gap, and where the keys taken end; the size of the row where they do not
    lie together, because a key that was too large had to be left out.
    """
    k, stop = 0, -1
    while k + WIDTH <= p_K.size:
        block = _block(p_K[k : k + WIDTH], least)
        if gap - block < left:
            break
        gap -= block
        k += WIDTH
    while k < p_K.size:
        if gap - p_K[k] >= left and p_K[k] <= least:
            gap -= p_K[k]
        elif p_K[k] <= least:
            if gap <= 2 * left:  # within reach of the window
                return gap, k if stop < 0 else p_K.size
            stop = k
        k += 1
    return gap, p_K.size


@compiled()
def _walked(
    inside_i: Block, outside_j: Block, least: np.float32, gap: float, enough: float
) -> float:
    """Exchange the next key in S for the next one outside, whenever that helps.

    Near-uniform rows need many small corrections of one sign: one walk gives them.
    """
    for k in range(min(inside_i.size, outside_j.size)):
        out, into = inside_i[k], outside_j[k]
        if 0 < out <= least and 0 < into <= least:
            left = gap - (np.float64(into) - np.float64(out))
            if abs(left) < abs(gap):
                gap = left
                if abs(gap) <= enough:
                    break
    return gap


@compiled()
def _attempt(
    p_K: Block, least: np.float32, total: float, enough: float, scratch: Scratch
) -> tuple[float, bool]:
    """Return the gap of a set, |gap| ≤ enough when it closed, and if it is proven."""
    v_n, room = scratch
    gap = total / 2
    if least < 1:
        m = _large_keys(p_K, least, v_n)
        gap, proven = _dealt(v_n[:m], total, room)
        if proven:
            return gap, True
    first = _window(p_K, least, v_n)
    v_w, rest_K = v_n[:WINDOW], p_K[first:]
    gap, stop = _filled(rest_K, least, gap, v_w.sum() / 2)
    near = quickly(v_w, gap, total, enough, room)
    if near <= enough:
        return near, False
    gap, _ = nearest(v_w, gap, total, enough, room)
    if abs(gap) > enough:
        gap = _walked(rest_K[:stop], rest_K[stop:], least, gap, enough)
    return gap, False


@compiled(reorder=True)
def _above(p_K: Block, least: np.float32) -> int:
    count = 0
    for k in range(p_K.size):
        count += p_K[k] > least
    return count


@compiled(reorder=True)
def _mass_above(p_K: Block, least: np.float32) -> float:
    total = 0.0
    for k in range(p_K.size):
        total += float(p_K[k]) if p_K[k] > least else 0.0
    return total


@compiled()
def heaviest(p_K: Block, most: int) -> float:
    """Return the sum of the ``most`` largest keys, found by bisecting their bits."""
    # More than ``most`` keys exceed the value with bits low, no more that with high.
    low, high = 0, _ONE_BITS
    while high - low > 1:
        middle = (low + high) // 2
        if _above(p_K, np.int32(middle).view(np.float32)) > most:
            low = middle
        else:
            high = middle
    least = np.int32(high).view(np.float32)
    equal = most - _above(p_K, least)
    return float(_mass_above(p_K, least) + equal * np.float64(least))


@compiled()
def _windowed(
    p_K: Block, total: float, count: int, enough: float, scratch: Scratch
) -> tuple[float, bool]:
    """Return the gap of a set, |gap| ≤ enough when it closed, and if it is proven.

    Where a few keys matter most, more and more of them are taken as large. An odd
    number of nearly equal keys has no half: if the larger half of all but one of them
    weighs no more than the rest, every set of so few keys weighs less, and the gap is
    proven.
    """
    least, gap = np.float32(total * max(_LARGE / count, 1 / WIDTH)), np.inf
    for _ in range(_ATTEMPTS):
        gap, proven = _attempt(p_K, least, total, enough, scratch)
        if proven or abs(gap) <= enough:
            return gap, proven
        if least >= 1 or _above(p_K, least) >= WIDTH:
            break
        least = np.float32(least / 4)
    if count % 2 == 1:
        minority = heaviest(p_K, count // 2)
        if 2 * minority <= total:
            return total / 2 - minority, True
    return gap, False


@compiled()
def interval(
    p_K: Block, sums: tuple[float, int, int], enough: float, scratch: Scratch
) -> tuple[float, float]:
    """Return θ's interval, or ``OPEN`` twice.

    Args:
        p_K: Masses relative to the largest, which is 1; hidden keys are 0.
        sums: The mass below 1, how many keys are 1, how many are above 0.
        enough: Share of the mass that may be missing from a half.
        scratch: Room for the row in float64, and for lists of sums.
    """
    below, tops, count = sums
    if below + tops <= 2.0 or count < 2:
        value = theta(1.0, below + (tops - 1))
        return value, value
    if below == 0.0:
        value = theta(float(tops // 2), float(tops - tops // 2))
        return value, value
    total = below + tops
    v_n, room = scratch
    if count > FEW:
        gap, proven = _windowed(p_K, total, count, enough * total, scratch)
    else:
        n = _visible(p_K, v_n)
        rest_n, target = v_n[1:n], total / 2 - v_n[0]
        gap, proven = nearest(rest_n, target, total, enough * total, room)
    value = theta(total / 2 + gap, total / 2 - gap)
    if proven:
        return value, value
    return (value, 1.0) if abs(gap) <= enough * total else (OPEN, OPEN)
