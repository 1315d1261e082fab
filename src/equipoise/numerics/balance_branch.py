"""Branch and bound over the keys of a sorted row: complete when the row is steep.

Axes, in this file:  n visible key, sorted from large to small.
Signs as in ``balance_sorted``: gap = ½ Σp - p(S), side 1 where a key is in S.
"""

import numpy as np

from equipoise.numerics.balance_compile import compiled
from equipoise.numerics.balance_sorted import Row, Side


@compiled()
def _after(v_n: Row) -> Row:
    """Return the mass of the keys from each position on, and 0 at the end."""
    rest_n = np.zeros(v_n.size + 1)
    for k in range(v_n.size - 1, -1, -1):
        rest_n[k] = rest_n[k + 1] + v_n[k]
    return rest_n


@compiled()
def branched(
    v_n: Row, half: float, gap: float, side_n: Side, enough: float, most: int
) -> tuple[float, bool]:
    """Try each key in S, then out of it, large keys first; return (gap, complete).

    A branch ends when S is full, or when all that is left does not fill it. Keys that
    dominate the rest leave few branches, so a steep row is searched completely. The
    largest key is in S: its complement is the same partition.
    """
    rest_n = _after(v_n)
    inside_n = np.zeros(v_n.size + 1, np.uint8)
    # One gap per level, not one that is added to and subtracted from: that drifts.
    gap_n = np.empty(v_n.size + 1)
    inside_n[0], gap_n[0], gap_n[1], k = 1, half, half - v_n[0], 1
    for _ in range(most):
        left = gap_n[k]
        if 0.0 < left < rest_n[k]:
            inside_n[k], gap_n[k + 1] = 1, left - v_n[k]
            k += 1
            continue
        all_in = left > 0.0
        end = left - rest_n[k] if all_in else left
        if abs(end) < abs(gap):
            gap = end
            side_n[:k] = inside_n[:k]
            side_n[k:] = all_in
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
