"""What an instrument reads off attention scores: θ, logits, entropy, sink, per row.

Axes, in this file:  x any leading axes · N row · K key.

All statistics of a row of scores in one visit, compiled.

Axes, in this file:  N row · K key · C column of the result.
A row of scores is read once from memory; its exponentials live in a scratch row that
stays in the first-level cache, and θ is found there by ``balance_window``.
"""

import math
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.host_view import host_view
from equipoise.numerics.rows import balance as balance_ladder
from equipoise.numerics.rows import ladder as balance_cpu
from equipoise.numerics.rows import torch_rows as balance_torch
from equipoise.numerics.rows.balance import DEPTH
from equipoise.numerics.rows.compiled import COMPILED, compiled, over_rows
from equipoise.numerics.rows.few import WINDOW, lists
from equipoise.numerics.rows.fill import OPEN
from equipoise.numerics.rows.window import Scratch, interval

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


# |p(S) - ½| that is small enough here: θ is then within 1e-6 of 1.
_ENOUGH = 2.0**-11
_OPTIONS = (_ENOUGH, float("inf"), DEPTH)
Rows = NDArray[np.floating]
Limits = NDArray[np.int64]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """One number per row of scores, in float32 (float64 for float64 scores)."""

    theta_lower: Float[Tensor, "*x"]
    theta_upper: Float[Tensor, "*x"]
    max_logit: Float[Tensor, "*x"]
    """-inf where no key is visible."""
    entropy: Float[Tensor, "*x"]
    """In nats."""
    sink: Float[Tensor, "*x"]
    """Mass of key 0."""
    p_max: Float[Tensor, "*x"]
    """Largest mass of any key."""
    score_square: Float[Tensor, "*x"]
    """Σz² over visible keys."""
    mass_square: Float[Tensor, "*x"]
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
    def jacobian_norm(self) -> Float[Tensor, "*x"]:
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
        on other devices ``theta_upper`` is 1 unless one key holds half of the mass.
        Rows with fewer than two visible keys have θ = 0 and are not ``counted``. A NaN
        or +inf score makes its row NaN.

    Example:
        >>> z = torch.tensor([[0.0, 0.0, -torch.inf], [2.0, 2.0, 2.0]])
        >>> read = row_statistics(z)
        >>> read.theta_lower, read.visible
        (tensor([1.0000, 0.8889]), tensor([2, 3], dtype=torch.int32))
    """
    return RowStatistics.of(row_columns(scores, causal_from=causal_from))


def row_columns(
    scores: Float[Tensor, "*x K"], *, causal_from: int | None = None
) -> Float[Tensor, "C *x"]:
    """Return the same in one tensor, for who puts the rows of many blocks together.

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
        out_CN = _on_cpu(z_xK.reshape(-1, z_xK.shape[-1]), sees)
    else:
        z_xK = z_xK if causal_from is None else _hidden(z_xK, causal_from)
        out_CN = _in_torch(z_xK.reshape(-1, z_xK.shape[-1])).T
    return out_CN.reshape(COLUMNS, *scores.shape[:-1])


def _limits(z_xK: Tensor, causal_from: int | None) -> tuple[int, int]:
    """Return how many keys the first row sees, and how many rows until it is so again.

    Every row sees one key more than the row before; a period of one row means that all
    see the same.
    """
    if causal_from is None:
        return z_xK.shape[-1], 1
    return causal_from + 1, z_xK.shape[-2] if z_xK.ndim > 1 else 1


def _hidden(z_xK: Tensor, causal_from: int) -> Tensor:
    first, period = _limits(z_xK, causal_from)
    future = torch.ones(period, z_xK.shape[-1], dtype=torch.bool, device=z_xK.device)
    future = future.triu(first) if z_xK.ndim > 1 else future.triu(first)[0]
    return z_xK.masked_fill(future, -torch.inf)


def _on_cpu(z_NK: Tensor, sees: tuple[int, int]) -> Tensor:
    z_NK = z_NK.contiguous()
    z = host_view(z_NK)
    out_CN = np.empty((COLUMNS, len(z)), np.float32)

    def work(start: int, stop: int) -> None:
        limit_N = sees[0] + np.arange(start, stop) % sees[1]
        rows, out = z[start:stop], out_CN[:, start:stop]
        statistics(rows, limit_N, out, _ENOUGH)
        left = np.flatnonzero(out[0] == OPEN)
        if left.size:
            out[:2, left] = _searched(rows[left], limit_N[left])

    over_rows(work, *z.shape)
    return torch.from_numpy(out_CN)


def _searched(z_NK: Rows, limit_N: Limits) -> Rows:
    """Return θ's bounds, two rows of them, where the first pass left θ open."""
    future = np.arange(z_NK.shape[1]) >= limit_N[:, None]
    z = np.where(future, -np.inf, z_NK.astype(np.float64))
    p = np.exp(z - z.max(-1, keepdims=True))
    return balance_cpu.intervals(p, None, _OPTIONS).T


def _in_torch(z_NK: Tensor) -> Tensor:
    visible = (z_NK > -torch.inf).sum(-1)
    dark = (visible == 0)[:, None]
    lit_NK = z_NK.masked_fill(dark, 0.0)
    top = lit_NK.amax(-1)
    p_NK = lit_NK.softmax(-1)
    far = (lit_NK - top[:, None]).clamp(min=torch.finfo(z_NK.dtype).min)
    entropy = torch.logsumexp(lit_NK - top[:, None], -1) - (p_NK * far).sum(-1)
    lower, upper = _theta(p_NK)
    seen_NK = lit_NK.masked_fill(lit_NK == -torch.inf, 0.0)
    squares = seen_NK.square().sum(-1), p_NK.square().sum(-1)
    columns = (lower, upper, top, entropy, p_NK[:, 0], p_NK.amax(-1), *squares)
    read = torch.stack(columns, -1)
    read = read.masked_fill(dark, 0.0)
    read[:, 2].masked_fill_(dark[:, 0], -torch.inf)
    return torch.cat([read, visible[:, None].to(read.dtype)], -1)


def _theta(p_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return θ's bounds; rows left open are searched only where that needs no sync."""
    if COMPILED and p_NK.device.type == "cpu":
        bounds_N2 = balance_torch.intervals(p_NK, None, _OPTIONS).to(p_NK.dtype)
        return bounds_N2[:, 0], bounds_N2[:, 1]
    lower, upper, _ = balance_torch.vectorised(p_NK)
    return lower, upper


def warm_up() -> None:
    """Compile, or load from the cache, the kernels of ``row_statistics``."""
    balance_ladder.warm_up()  # rows left open are finished by the ladder
    row_statistics(torch.zeros(1, 3))
