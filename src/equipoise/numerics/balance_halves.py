"""Meet in the middle: the subset sum nearest a target, out of 2ᵐ, for about 2^(m/2).

Axes, in this file:  m key taken into the search · s subset sum of one half.
Keys are dealt in turn to two halves. Each half lists its subset sums in order, built by
merging one key at a time; equal sums are kept once, so repeated keys stay cheap.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.balance_compile import compiled
from equipoise.numerics.balance_sorted import Row

Bits = NDArray[np.int64]


@compiled()
def _subset_sums(w_m: Row, first: int) -> tuple[Row, Bits]:
    """Return all subset sums of w[first::2] in order, each with one subset as bits."""
    sum_s, bits_s = np.zeros(1), np.zeros(1, np.int64)
    for k in range(first, w_m.size, 2):
        w, bit = w_m[k], np.int64(1) << np.int64(k // 2)
        n = sum_s.size
        merged, subset = np.empty(2 * n), np.empty(2 * n, np.int64)
        i, j, size = 0, 0, 0
        while i < n or j < n:
            without = sum_s[i] if i < n else np.inf
            having = sum_s[j] + w if j < n else np.inf
            if without <= having:
                merged[size], subset[size] = without, bits_s[i]
                i += 1
                if without == having:
                    j += 1
            else:
                merged[size], subset[size] = having, bits_s[j] | bit
                j += 1
            size += 1
        sum_s, bits_s = merged[:size], subset[:size]
    return sum_s, bits_s


@compiled()
def nearest_sums(
    w_m: Row, target: float
) -> tuple[float, np.int64, np.int64, float, np.int64, np.int64]:
    """Return the largest subset sum ≤ target and the smallest > target, with subsets.

    A subset is two integers: bit i of the first is key 2i, of the second key 2i + 1.
    """
    a_s, a_bits = _subset_sums(w_m, 0)
    b_s, b_bits = _subset_sums(w_m, 1)
    below, below_i, below_j = -np.inf, 0, 0
    above, above_i, above_j = np.inf, 0, 0
    j = b_s.size - 1
    for i in range(a_s.size):
        while j >= 0 and a_s[i] + b_s[j] > target:
            if a_s[i] + b_s[j] < above:
                above, above_i, above_j = a_s[i] + b_s[j], i, j
            j -= 1
        if j < 0:
            break
        if a_s[i] + b_s[j] > below:
            below, below_i, below_j = a_s[i] + b_s[j], i, j
    return (
        below,
        a_bits[below_i],
        b_bits[below_j],
        above,
        a_bits[above_i],
        b_bits[above_j],
    )
