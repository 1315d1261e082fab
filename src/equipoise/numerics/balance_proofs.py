"""Lower bounds on the gap of every partition: by counting, and by a common divisor.

Axes, in this file:  n visible key, sorted from large to small · m large key.
"""

import numpy as np

from equipoise.numerics.balance_compile import compiled
from equipoise.numerics.balance_sorted import Row

_PLATEAUS = 4
# Remainders below this share of the largest key are rounding.
_ROUNDING = 1e-13


@compiled()
def _counted_gap(v_m: Row, half: float, rest: float) -> float:
    """Return the distance from ½ to the nearest interval of ``cardinality_gap``."""
    nearest, top, bottom = np.inf, 0.0, 0.0
    for c in range(v_m.size + 1):
        nearest = min(nearest, max(half - (top + rest), bottom - half, 0.0))
        if c < v_m.size:
            top += v_m[c]
            bottom += v_m[v_m.size - 1 - c]
    return nearest


@compiled()
def cardinality_gap(v_n: Row, half: float) -> float:
    """Return a proven lower bound on |gap| over all subsets, by counting large keys.

    Take the m largest keys as large, the mass r of all others as slack. A subset with
    c large keys has p(S) in [Σ c smallest large, Σ c largest large + r]; if ½ lies
    in none of these intervals, its distance to the nearest one bounds every |gap|.
    Uniform rows of odd length are exact here, and so are rows close to them. Only the
    ends of plateaus are tried as m (the next key is less than half as large), and few
    of them: elsewhere the intervals overlap, and steep rows are better searched.
    """
    proven, rest, tried = 0.0, 0.0, 0
    for m in range(v_n.size, 0, -1):
        if rest >= v_n[0] or tried == _PLATEAUS:
            break
        if m == v_n.size or 2 * v_n[m] < v_n[m - 1]:
            proven = max(proven, _counted_gap(v_n[:m], half, rest))
            tried += 1
        rest += v_n[m - 1]
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
