"""Lower bounds on the gap of every partition: by counting, and by a common divisor.

Axes, in this file:  n visible key, sorted from large to small · m large key.
"""

import numpy as np

from equipoise.numerics.rows.compiled import compiled
from equipoise.numerics.rows.sorted_rows import Row

_PLATEAUS = 4
# Peaks above a plateau whose places are all tried: 2² of them.
_PEAKS = 3
# Remainders below this share of the largest key are rounding.
_ROUNDING = 1e-13


@compiled()
def _counted_gap(v_m: Row, half: float, rest: float) -> float:
    """Return the distance from a target to the nearest interval of that many keys."""
    nearest, top, bottom = np.inf, 0.0, 0.0
    for c in range(v_m.size + 1):
        nearest = min(nearest, max(half - (top + rest), bottom - half, 0.0))
        if c < v_m.size:
            top += v_m[c]
            bottom += v_m[v_m.size - 1 - c]
    return nearest


@compiled()
def _plateau_gap(v_n: Row, target: float) -> float:
    """Return a proven lower bound on |p(S) - target| over all subsets, by counting.

    Take the m largest keys as large, the mass r of all others as slack. A subset with
    c large keys has p(S) in [Σ c smallest large, Σ c largest large + r]; if the target
    lies in none of these intervals, its distance to the nearest one bounds them all.
    Only the ends of plateaus are tried as m (the next key is less than half as large),
    and few of them: elsewhere intervals overlap, and steep rows are better searched.
    """
    proven, rest, tried = 0.0, 0.0, 0
    for m in range(v_n.size, 0, -1):
        if rest >= v_n[0] or tried == _PLATEAUS:
            break
        if m == v_n.size or 2 * v_n[m] < v_n[m - 1]:
            proven = max(proven, _counted_gap(v_n[:m], target, rest))
            tried += 1
        rest += v_n[m - 1]
    return proven


@compiled()
def cardinality_gap(v_n: Row, half: float) -> float:
    """Return a proven lower bound on |gap| over all subsets, by counting large keys.

    Uniform rows of odd length are exact here, and so are rows close to them. Where a
    few peaks (a sink) stand above a plateau, each way to place the peaks leaves a
    target for the plateau; the largest peak may be taken as in S, since S and its
    complement have the same gap.
    """
    proven = _plateau_gap(v_n, half)
    for t in range(1, min(_PEAKS, v_n.size - 1) + 1):
        if 2 * v_n[t] >= v_n[t - 1]:
            continue
        nearest = np.inf
        for places in range(1 << (t - 1)):
            taken = v_n[0]
            for k in range(1, t):
                taken += v_n[k] if (places >> (k - 1)) & 1 else 0.0
            nearest = min(nearest, _plateau_gap(v_n[t:], half - taken))
        proven = max(proven, nearest)
    return proven


@compiled()
def _common_divisor(v_n: Row, least: float) -> float:
    """Return the common divisor of all keys up to rounding, or 0 if below ``least``."""
    unit = v_n[0]
    tiny = _ROUNDING * v_n[0]
    for k in range(1, v_n.size):
        a, b = unit, v_n[k]
        while b > tiny:
            a, b = b, a - b * np.floor(a / b + 1e-9)
        unit = a
        if unit < least:
            return 0.0
    return float(unit)


@compiled()
def lattice_gap(v_n: Row, half: float, least: float) -> float:
    """Return a proven lower bound on |gap| from a common divisor of the keys.

    If p_k = i_k g + ε_k with integers i_k, every p(S) is within Σ|ε| of a multiple of
    g; so is ½, or no partition comes closer than what is missing. Rows in 16 bits, and
    small integers over their sum, are of this kind. Bounds below ``least`` are not
    looked for.
    """
    unit = _common_divisor(v_n, least)
    if unit == 0.0:
        return 0.0
    multiples = 0.0
    for k in range(v_n.size):
        multiples += np.rint(v_n[k] / unit)
    unit, off = 2 * half / multiples, 0.0
    for k in range(v_n.size):
        off += abs(v_n[k] - np.rint(v_n[k] / unit) * unit)
    missing = abs(half - np.rint(half / unit) * unit)
    return float(max(missing - off, 0.0))
