"""What an instrument reads off attention scores: θ, logits, entropy, sink, per row.

Axes, in this file:  x any leading axes · N row · n open row · K key · C column of the
result.
One compiled visit: a row of scores is read once from memory; its exponentials live in a
scratch row that stays in the first-level cache, and θ is found there by ``window``.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.compiled import (
    COMPILED,
    bits,
    compiled,
    host_view,
    inner,
    over_rows,
    single,
)
from equipoise.numerics.rows import ladder, torch_rows
from equipoise.numerics.rows.window import OPEN, row_bounds, scratch

Scores = NDArray[np.float32]
Statistics = NDArray[np.float32]
# Columns of the result.
LOWER, UPPER, MAX_LOGIT, ENTROPY, SINK, TOP_MASS, SCORES, MASSES, VISIBLE = range(9)
COLUMNS = 9

_NOTHING, _ZERO, _ONE = np.float32(-np.inf), np.float32(0), np.float32(1)
# -inf and +inf as ordered integers; what lies beyond is NaN.
_LEAST, _INFINITY, _MAGNITUDE = -0x7F800001, 0x7F800000, np.int32(0x7FFFFFFF)
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
# |p(S) - ½| that is small enough here: θ is then within 1e-6 of 1.
_ENOUGH = 2.0**-11


@inner(fuse=True)
def exponentials(z_K: Scores, stop: int, top: np.float32, e_K: Scores) -> None:
    """Write exp(z - top), accurate to two units in the last place of z - top's image.

    z - top = n ln 2 + r; the sum for exp(r) is scaled by 2ⁿ through its exponent bits.
    Branch-free, so that it vectorises: numba has no vector exponential of its own.
    """
    for k in range(stop):
        d = z_K[k] - top
        d = d if d > _FLOOR else _FLOOR
        shifted = d * _PER_LN2 + _TO_INTEGER
        n = shifted - _TO_INTEGER
        r = (d - n * _LN2_HIGH) - n * _LN2_LOW
        y = _TERMS[7] * r + _TERMS[6]
        y = ((y * r + _TERMS[5]) * r + _TERMS[4]) * r + _TERMS[3]
        y = ((y * r + _TERMS[2]) * r + _TERMS[1]) * r + _TERMS[0]
        scaled = single(bits(y) + (bits(shifted) << np.int32(23)))
        e_K[k] = scaled if d > _FLOOR else np.float32(0)


@inner(reorder=True)
def _extremes(z_K: Scores, stop: int) -> tuple[np.int32, np.int32, np.int32]:
    """Return the smallest and largest score as ordered integers, and the visible count.

    Flipping the magnitude bits of negative floats makes their patterns sort as
    integers, NaN beyond either infinity: integer extremes vectorise and see it.
    """
    low, high, seen = np.int32(2**31 - 1), np.int32(-(2**31)), np.int32(0)
    for k in range(stop):
        pattern = bits(z_K[k])
        pattern ^= (pattern >> np.int32(31)) & _MAGNITUDE
        low = pattern if pattern < low else low
        high = pattern if pattern > high else high
        seen += np.int32(z_K[k] > _NOTHING)
    return low, high, seen


@inner(reorder=True)
def _moments(
    z_K: Scores, stop: int, e_K: Scores, top: np.float32
) -> tuple[float, float, float, float, Any, Any]:
    """Return Σe below 1, Σ e·(z - top), Σz² over visible keys and Σe².

    Also how many keys have the largest mass, which is 1, and how many have any.
    """
    below, first, scores, masses = 0.0, 0.0, 0.0, 0.0
    tops, some = np.int32(0), np.int32(0)
    for k in range(stop):
        e, z = e_K[k], z_K[k]
        below += float(e) if e < _ONE else 0.0
        first += float(e * (z - top if e > _ZERO else _ZERO))
        scores += float(z * z if z > _NOTHING else _ZERO)
        masses += e * e
        tops += np.int32(e == _ONE)
        some += np.int32(e > _ZERO)
    return below, first, scores, masses, tops, some


@inner()
def _unread(low: Any, high: Any, out_CN: Statistics, at: int) -> None:
    """Write the row of a NaN, of +inf, or of no visible key."""
    broken = low < _LEAST or high > _INFINITY
    nothing = out_CN[VISIBLE, at] == _ZERO and not broken
    for c in range(VISIBLE):
        out_CN[c, at] = 0.0 if nothing else np.nan
    if not broken:
        out_CN[MAX_LOGIT, at] = -np.inf if nothing else np.inf


@compiled()
def read_rows(
    z_NK: Scores,
    sees: tuple[int, int, int],
    e_K: Scores,
    room: Scores,
    out_CN: Statistics,
) -> None:
    """Write the statistics of every row of scores; masked keys are -inf.

    Row i of all sees ``sees[0]`` keys and one more for each row since the last multiple
    of ``sees[1]``; ``sees[2]`` is the first row here, and its place in the result.
    """
    first, period, begin = sees
    K = z_NK.shape[1]
    for i in range(z_NK.shape[0]):
        at = begin + i
        limit = first + at % period
        z_K, stop = z_NK[i], limit if limit < K else K
        low, high, seen = _extremes(z_K, stop)
        out_CN[VISIBLE, at] = seen
        if low < _LEAST or high >= _INFINITY or seen == 0:
            _unread(low, high, out_CN, at)
            continue
        while z_K[stop - 1] == _NOTHING:
            stop -= 1
        top = single(high ^ ((high >> np.int32(31)) & _MAGNITUDE))
        exponentials(z_K, stop, top, e_K)
        below, moment, scores, masses, tops, some = _moments(z_K, stop, e_K, top)
        mass = below + tops
        facts = (stop, mass, _ENOUGH * mass)
        keys = (below, 1.0, np.int64(tops), np.int64(some))
        out_CN[LOWER, at], out_CN[UPPER, at] = row_bounds(e_K, facts, keys, room)
        entropy = math.log(mass) - moment / mass
        out_CN[MAX_LOGIT, at] = top
        out_CN[ENTROPY, at] = entropy if entropy > 0.0 else 0.0
        out_CN[SINK, at] = e_K[0] / mass
        out_CN[TOP_MASS, at] = 1.0 / mass
        out_CN[SCORES, at] = scores
        out_CN[MASSES, at] = masses / (mass * mass)


_OPTIONS = (_ENOUGH, float("inf"), 1.0)
# Open rows gathered at a time.
_TOGETHER = 64
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

PerRow = Float[Tensor, "*x"]


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """One number per row of scores, in float32 (float64 for float64 scores)."""

    theta_lower: PerRow
    theta_upper: PerRow
    max_logit: PerRow
    """-inf where no key is visible."""
    entropy: PerRow
    """In nats."""
    sink: PerRow
    """Mass of key 0."""
    p_max: PerRow
    """Largest mass of any key."""
    score_square: PerRow
    """Σz² over visible keys."""
    mass_square: PerRow
    """Σp²."""
    visible: Int[Tensor, "*x"]
    """Keys with a score above -inf."""

    @classmethod
    def of(cls, columns_Cx: Float[Tensor, "C *x"]) -> Self:
        """Return the columns of ``row_columns`` under their names."""
        *columns, visible = columns_Cx.unbind(0)
        names = [field.name for field in fields(cls)][:-1]
        return cls(**dict(zip(names, columns, strict=True)), visible=visible.int())

    @property
    def jacobian_norm(self) -> PerRow:
        """‖∂ softmax‖₂ from above, within 2×: p_max, or 2 p_max(1 - p_max) past ½."""
        p = self.p_max
        return torch.where(p > 0.5, (2 * p * (1 - p)).clamp(max=0.5), p)

    @property
    def counted(self) -> Bool[Tensor, "*x"]:
        """Rows over which θ is read: at least two visible keys."""
        return self.visible >= 2


def row_statistics(
    scores: Float[Tensor, "*x K"], *, causal_from: int | None = None
) -> RowStatistics:
    """Return θ, max logit, entropy, sink mass and visible keys of every row of scores.

    θ = 4 max_S p(S) p(Sᶜ),  H = log Z - Σ p (z - z_max),  p = softmax(z), where scores
    include the model's scale and -inf marks a masked key. On the CPU one compiled pass
    reads each row once; elsewhere torch operations that never synchronise.

    Args:
        scores: A block of scores, for instance (B, H, q, K). float16, bfloat16 (read
            in float32), float32 or float64.
        causal_from: If given, row i of the axis before the last sees keys 0 …
            ``causal_from`` + i; what lies beyond need not be masked, and is not read.

    Returns:
        θ's interval is at most 1e-6 wide on the CPU, except for rows too hard to close;
        on other devices ``theta_upper`` is 1 unless a split is proven to be the best.
        Rows with fewer than two visible keys have θ = 0 and are not ``counted``. A NaN
        or +inf score makes its row NaN.

    Example:
        >>> z = torch.tensor([[0.0, 0.0, -torch.inf], [2.0, 2.0, 2.0]])
        >>> read = row_statistics(z)
        >>> read.theta_lower, read.visible
        (tensor([1.0000, 0.8889]), tensor([2, 3], dtype=torch.int32))
    """
    columns_Cx = row_columns(scores, causal_from=causal_from, sort_open=True)
    return RowStatistics.of(columns_Cx)


def row_columns(
    scores: Float[Tensor, "*x K"],
    *,
    causal_from: int | None = None,
    sort_open: bool = False,
) -> Float[Tensor, "C *x"]:
    """Return the same in one tensor, for callers that join the rows of many blocks.

    The few rows left open keep 1 as their upper bound unless ``sort_open``: sorting is
    another kernel to compile, for a θ that moves by less than any reading shows.

    >>> row_columns(torch.zeros(5, 2)).shape == (COLUMNS, 5)
    True
    """
    if scores.dtype not in _FLOATS or scores.ndim == 0 or scores.shape[-1] == 0:
        raise InputError(
            f"scores must be a float tensor with at least one key on the last axis, "
            f"not {scores.dtype} of shape {tuple(scores.shape)}"
        )
    z_xK = scores.detach()
    if z_xK.dtype != torch.float64:
        z_xK = z_xK.float()
    if COMPILED and z_xK.device.type == "cpu" and z_xK.dtype == torch.float32:
        sees = _limits(z_xK, causal_from)
        out_CN = _on_cpu(z_xK.reshape(-1, z_xK.shape[-1]), sees, sort_open)
    else:
        first, period = _limits(z_xK, causal_from)
        future = z_xK.new_ones(period, z_xK.shape[-1], dtype=torch.bool).triu(first)
        z_xK = z_xK if causal_from is None else z_xK.masked_fill(future, -torch.inf)
        out_CN = _in_torch(z_xK.reshape(-1, z_xK.shape[-1]))
    return out_CN.reshape(COLUMNS, *scores.shape[:-1])


def _limits(z_xK: Tensor, causal_from: int | None) -> tuple[int, int]:
    """Return how many keys the first row sees, and after how many rows it repeats."""
    if causal_from is None:
        return z_xK.shape[-1], 1
    return causal_from + 1, z_xK.shape[-2] if z_xK.ndim > 1 else 1


def _on_cpu(z_NK: Tensor, sees: tuple[int, int], sort_open: bool) -> Tensor:
    z = host_view(z_NK.contiguous())
    out_CN = np.empty((COLUMNS, len(z)), np.float32)

    def work(start: int, stop: int) -> None:
        e_K, room = np.empty(z.shape[1], np.float32), scratch(z.shape[1])
        read_rows(z[start:stop], (*sees, start), e_K, room, out_CN)
        left = start + np.flatnonzero(out_CN[UPPER, start:stop] == OPEN)
        out_CN[UPPER, left] = 1.0
        for i in range(0, left.size if sort_open else 0, _TOGETHER):
            few = left[i : i + _TOGETHER]
            out_CN[:2, few] = _sorted(z[few], sees[0] + few % sees[1]).T

    over_rows(work, *z.shape)
    return torch.from_numpy(out_CN)


def _sorted(z_nK: Scores, limit_n: NDArray[np.int64]) -> ladder.Bounds:
    """Return θ's bounds of rows that the unsorted pass left open."""
    hidden_nK = np.arange(z_nK.shape[1]) >= limit_n[:, None]
    z_nK = np.where(hidden_nK, _NOTHING, z_nK)
    e_nK = np.exp(z_nK - z_nK.max(-1, keepdims=True), dtype=np.float64)
    return ladder.intervals(e_nK, None, _OPTIONS)


def _in_torch(z_NK: Tensor) -> Tensor:
    """Return the columns in torch; rows left open are closed where that waits for none.

    On the CPU these are float64 rows.
    """
    out_CN = torch_rows.columns(z_NK)
    if COMPILED and z_NK.device.type == "cpu":
        p_NK = z_NK.masked_fill(out_CN[VISIBLE][:, None] == 0, 0.0).softmax(-1)
        bounds_2N = torch.from_numpy(ladder.intervals(p_NK.numpy(), None, _OPTIONS).T)
        out_CN[:2] = bounds_2N.masked_fill(out_CN[VISIBLE] == 0, 0.0)
    return out_CN


def warm_up() -> None:
    """Compile, or load from the cache, the kernels of ``row_statistics``."""
    row_columns(torch.zeros(1, 3))
