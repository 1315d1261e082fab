"""All statistics of a row of scores in one visit, compiled.

Axes, in this file:  N row · K key · C column of the result.
A row of scores is read once from memory; its exponentials live in a scratch row that
stays in the first-level cache, and θ is found there by ``balance_window``.
"""

import math

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.balance_compile import compiled
from equipoise.numerics.balance_few import WINDOW, lists
from equipoise.numerics.balance_window import Scratch, interval

Scores = NDArray[np.float32]
Statistics = NDArray[np.float32]
# Columns of the result.
LOWER, UPPER, MAX_LOGIT, ENTROPY, SINK, TOP, SCORES, MASSES, VISIBLE = range(9)
COLUMNS = 9

_NOTHING, _ZERO, _ONE = np.float32(-np.inf), np.float32(0), np.float32(1)
# -inf and +inf as ordered integers; what lies beyond is NaN.
_LEAST, _INFINITY = -0x7F800001, 0x7F800000
# exp(r) = Σ rⁱ/i! for |r| ≤ ½ ln 2: the first term left out is below 6e-9.
_TERMS = tuple(np.float32(1 / math.factorial(i)) for i in range(8))
_PER_LN2 = np.float32(1 / math.log(2))
# ln 2 in two parts; the first has 16 bits, so that a small integer times it is exact.
_LN2_HIGH = np.float32(round(math.log(2) * 2**16) / 2**16)
_LN2_LOW = np.float32(math.log(2) - round(math.log(2) * 2**16) / 2**16)
# Adding 1.5·2²³ rounds a float32 to an integer, which is then its lowest bits.
_TO_INTEGER = np.float32(1.5 * 2**23)
# exp(-87) is just above the smallest normal float32: less is 0, as a masked key is.
_FLOOR = np.float32(-87.0)


@compiled()
def exponentials(z_K: Scores, top: np.float32, e_K: Scores) -> None:
    """Write exp(z - top), accurate to two units in the last place of z - top's image.

    z - top = n ln 2 + r; the sum for exp(r) is scaled by 2ⁿ through its exponent bits.
    Branch-free, so that it vectorises: numba has no vector exponential of its own.
    """
    for k in range(z_K.size):
        d = max(z_K[k] - top, _FLOOR)
        shifted = d * _PER_LN2 + _TO_INTEGER
        n = shifted - _TO_INTEGER
        r = (d - n * _LN2_HIGH) - n * _LN2_LOW
        y = _TERMS[7] * r + _TERMS[6]
        y = ((y * r + _TERMS[5]) * r + _TERMS[4]) * r + _TERMS[3]
        y = ((y * r + _TERMS[2]) * r + _TERMS[1]) * r + _TERMS[0]
        scale = np.float32(shifted).view(np.int32) << np.int32(23)
        scaled = np.int32(np.float32(y).view(np.int32) + scale).view(np.float32)
        e_K[k] = scaled if d > _FLOOR else np.float32(0)


@compiled(reorder=True)
def _extremes(z_K: Scores) -> tuple[np.int32, np.int32, np.int32]:
    """Return the smallest and largest score as ordered integers, and the visible count.

    Flipping the magnitude bits of negative floats makes their patterns sort as
    integers, NaN beyond either infinity: integer extremes vectorise and see it.
    """
    low, high, seen = np.int32(2**31 - 1), np.int32(-(2**31)), np.int32(0)
    for k in range(z_K.size):
        pattern = np.float32(z_K[k]).view(np.int32)
        pattern ^= (pattern >> np.int32(31)) & np.int32(0x7FFFFFFF)
        low, high = min(low, pattern), max(high, pattern)
        seen += np.int32(z_K[k] > _NOTHING)
    return low, high, seen


@compiled(reorder=True)
def _moments(
    z_K: Scores, top: np.float32, e_K: Scores
) -> tuple[float, float, float, float]:
    """Return Σe below 1, Σ e·(z - top), Σz² over visible keys and Σe²."""
    below, first, scores, masses = 0.0, 0.0, 0.0, 0.0
    for k in range(z_K.size):
        below += float(e_K[k]) if e_K[k] < _ONE else 0.0
        first += e_K[k] * max(z_K[k] - top, _FLOOR)
        scores += z_K[k] * z_K[k] if z_K[k] > _NOTHING else 0.0
        masses += e_K[k] * e_K[k]
    return below, first, scores, masses


@compiled(reorder=True)
def _counts(e_K: Scores) -> tuple[np.int32, np.int32]:
    """Return how many keys have the largest mass, which is 1, and how many have any."""
    tops, some = np.int32(0), np.int32(0)
    for k in range(e_K.size):
        tops += np.int32(e_K[k] == _ONE)
        some += np.int32(e_K[k] > _ZERO)
    return tops, some


@compiled()
def _row(
    z_K: Scores, scratch: tuple[Scores, Scratch], enough: float, out: Statistics
) -> None:
    low, high, seen = _extremes(z_K)
    out[VISIBLE] = seen
    if low < _LEAST or high >= _INFINITY:
        out[:VISIBLE] = np.nan
        out[MAX_LOGIT] = np.inf if low >= _LEAST and high == _INFINITY else np.nan
        return
    if seen == 0:
        out[:VISIBLE] = 0.0
        out[MAX_LOGIT] = -np.inf
        return
    stop = z_K.size
    while z_K[stop - 1] == _NOTHING:
        stop -= 1
    e_K, z_K = scratch[0][:stop], z_K[:stop]
    flipped = np.int32(high ^ ((high >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    top = flipped.view(np.float32)
    exponentials(z_K, top, e_K)
    below, first, scores, masses = _moments(z_K, top, e_K)
    tops, some = _counts(e_K)
    mass = below + tops
    sums = (below, int(tops), int(some))
    out[LOWER], out[UPPER] = interval(e_K, sums, enough, scratch[1])
    out[MAX_LOGIT] = top
    out[ENTROPY] = max(math.log(mass) - first / mass, 0.0)
    out[SINK] = e_K[0] / mass
    out[TOP] = 1.0 / mass
    out[SCORES] = scores
    out[MASSES] = masses / (mass * mass)


@compiled()
def statistics(
    z_NK: NDArray[np.float32],
    limit_N: NDArray[np.int64],
    out_CN: Statistics,
    enough: float,
) -> None:
    """Write the statistics of every row of scores; masked keys are -inf.

    Row i sees no key from ``limit_N[i]`` on, whatever its score.
    """
    K = z_NK.shape[1]
    scratch = (np.empty(K, np.float32), (np.empty(max(K, WINDOW)), lists()))
    for i in range(z_NK.shape[0]):
        _row(z_NK[i, : min(K, limit_N[i])], scratch, enough, out_CN[:, i])
