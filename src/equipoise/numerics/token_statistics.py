"""Sizes and directions of tokens, Adam's update, tails, quantiles, without copies.

Axes, in this file:  B batch · T token · N token of any sequence · D channel ·
P parameter · x any leading axes · q quantile.

For an instrument: nothing here is differentiable. What the compiled loops cannot read
where it lies goes through torch, to the same result.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from equipoise.numerics.compiled import (
    COMPILED,
    VIEWED,
    compiled,
    host_view,
    over_rows,
    singles_at,
    to_device,
)
from equipoise.numerics.norms import layer_norm_scale, rms

Singles = NDArray[np.float32]
_PLAIN = (Tensor, torch.nn.Parameter)
# Vectors shorter than this are divided by it, not by their length.
_SHORT = 1e-12


class Sizes(NamedTuple):
    """Root mean squares of every token, in at least float32."""

    around_zero: Tensor
    around_mean: Tensor


def token_sizes(x_xD: Float[Tensor, "*x D"]) -> Sizes:
    """Return √mean(x²) and √mean((x - mean x)²) of every token, summed in float64.

    >>> token_sizes(torch.tensor([3.0, 1.0])).around_mean
    tensor(1.)
    """
    x_xD = x_xD.detach()
    if not _readable(x_xD) or x_xD.ndim == 0:
        return Sizes(rms(x_xD), layer_norm_scale(x_xD, eps=0.0))
    x_ND = host_view(x_xD).reshape(-1, x_xD.shape[-1])
    out_N2 = np.empty((len(x_ND), 2), np.float32)
    over_rows(lambda i, j: _sizes(x_ND[i:j], out_N2[i:j]), *x_ND.shape)
    out_2N = torch.from_numpy(np.ascontiguousarray(out_N2.T))
    zero, mean = out_2N.reshape(2, *x_xD.shape[:-1]).unbind(0)
    return Sizes(zero, mean)


@compiled(reorder=True)
def _sizes(x_ND: Singles, out_N2: Singles) -> None:
    D = x_ND.shape[1]
    for n in range(x_ND.shape[0]):
        total, square, centred = 0.0, 0.0, 0.0
        for d in range(D):
            total += x_ND[n, d]
        mean = total / D
        for d in range(D):
            x = np.float64(x_ND[n, d])
            square += x * x
            centred += (x - mean) * (x - mean)
        out_N2[n, 0] = math.sqrt(square / D)
        out_N2[n, 1] = math.sqrt(centred / D)


def kurtosis(x: Float[Tensor, "*x"]) -> Tensor:
    """Return E[(x−μ)⁴]/E[(x−μ)²]² over all entries: 3 for a Gaussian.

    NaN where the entries are alike but for rounding: they have no shape.

    >>> kurtosis(torch.tensor([1.0, -1.0]))
    tensor(1.)
    """
    x = x.detach()
    flat = (16 * torch.finfo(x.dtype).eps) ** 2
    if not _readable(x):
        mean = x.mean()
        square = (x - mean).square()
        second = square.mean()
        ratio = square.square().mean() / second.square()
        return torch.where(second > flat * mean.square(), ratio, torch.nan)
    centre, total, fourth = _powers(host_view(x).ravel())
    known = total > flat * centre**2 * x.numel()
    value = fourth / total**2 * x.numel() if known else math.nan
    return torch.tensor(value, dtype=torch.float32)


@compiled(reorder=True)
def _powers(x_P: Singles) -> tuple[float, float, float]:
    """Return μ, Σ(x−μ)² and Σ(x−μ)⁴."""
    total, second, fourth = 0.0, 0.0, 0.0
    for p in range(x_P.size):
        total += x_P[p]
    mean = total / x_P.size
    for p in range(x_P.size):
        square = (x_P[p] - mean) * (x_P[p] - mean)
        second += square
        fourth += square * square
    return mean, second, fourth


def token_cosine(x_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B"]:
    """Return per sequence the mean cosine over pairs of different tokens.

    Σ_{i≠j} x̂_i·x̂_j = ‖Σ x̂_i‖² − Σ‖x̂_i‖², so no T × T matrix is formed. A token of
    length 0 has cosine 0 with all.

    >>> token_cosine(torch.ones(1, 5, 3)).round(decimals=6)
    tensor([1.])
    """
    x_BTD, T = x_BTD.detach(), x_BTD.shape[1]
    if not _readable(x_BTD):
        unit_BTD = torch.nn.functional.normalize(x_BTD, dim=-1, eps=_SHORT)
        together = unit_BTD.sum(1).square().sum(-1)
        alone = unit_BTD.square().sum((1, 2))
        return (together - alone) / (T * (T - 1))
    sum_D = np.empty(x_BTD.shape[2])
    pairs_B = [_pairs(x_TD, sum_D) for x_TD in host_view(x_BTD)]
    return torch.tensor(pairs_B, dtype=torch.float32) / (T * (T - 1))


@compiled(reorder=True)
def _pairs(x_TD: Singles, sum_D: NDArray[np.float64]) -> float:
    """Return ‖Σ x̂‖² − Σ‖x̂‖²; the sum of the unit vectors stays in ``sum_D``."""
    sum_D[:] = 0.0
    alone, together = 0.0, 0.0
    for t in range(x_TD.shape[0]):
        square = 0.0
        for d in range(sum_D.size):
            square += np.float64(x_TD[t, d]) * np.float64(x_TD[t, d])
        inverse = 1.0 / max(math.sqrt(square), _SHORT)
        alone += square * inverse * inverse
        for d in range(sum_D.size):
            sum_D[d] += x_TD[t, d] * inverse
    for d in range(sum_D.size):
        together += sum_D[d] * sum_D[d]
    return together - alone


def adam_norms(
    m_P: Sequence[Tensor],
    v_P: Sequence[Tensor],
    *,
    floors: Sequence[float],
    rates: Sequence[float | Tensor],
) -> Float[Tensor, " P"]:
    """Return rate·‖m/(√v + floor)‖₂ of each parameter, the length of Adam's step.

    All parameters in one compiled call: most are short, and a call costs more than
    they do.

    >>> m, v = torch.tensor([3.0, 8.0]), torch.tensor([1.0, 4.0])
    >>> adam_norms([m], [v], floors=[0.0], rates=[0.1])
    tensor([0.5000], dtype=torch.float64)
    """
    each = list(zip(m_P, v_P, floors, rates, strict=True))
    if not all(map(_is_host_step, m_P, v_P, rates)):
        return torch.stack(
            [_step_norm(m, v, floor) * rate for m, v, floor, rate in each]
        )
    memory = [(m.data_ptr(), v.data_ptr(), m.numel()) for m, v, _, _ in each]
    square_P = np.empty(len(memory))
    _steps(np.array(memory, np.int64), np.array(floors, np.float32), square_P)
    return torch.from_numpy(np.sqrt(square_P) * np.array(rates))


def _is_host_step(m: Tensor, v: Tensor, rate: float | Tensor) -> bool:
    readable = _readable(m) and _readable(v) and m.shape == v.shape
    return readable and not isinstance(rate, Tensor)


def _step_norm(m: Tensor, v: Tensor, floor: float) -> Tensor:
    step = m.detach() / (v.detach().sqrt() + floor)
    norm: Tensor = torch.linalg.vector_norm(step.to(torch.float32))
    return norm


@compiled(reorder=True)
def _steps(memory_P3: NDArray[np.int64], floor_P: Singles, square_P: Any) -> None:
    for p in range(len(memory_P3)):
        m, v, size = memory_P3[p]
        m_x, v_x, total = singles_at(m, size), singles_at(v, size), 0.0
        for x in range(size):
            step = m_x[x] / (np.float32(math.sqrt(v_x[x])) + floor_P[p])
            total += step * step
        square_P[p] = total


def _readable(x: Tensor) -> bool:
    plain = type(x) in _PLAIN and x.is_cpu and x.dtype == torch.float32
    return COMPILED and plain and x.is_contiguous() and x.numel() > 0


def nan_quantiles(
    x_xN: Float[Tensor, "*x N"], at: Sequence[float]
) -> Float[Tensor, "q *x"]:
    """Return quantiles over the last axis, NaN left out; NaN where nothing is left.

    Linear between the values of rank ⌊q(n−1)⌋ and ⌈q(n−1)⌉ among n. On the CPU NumPy
    sorts, eight times as fast as torch does; nothing here is differentiable.

    Example:
        >>> nan_quantiles(torch.tensor([1.0, torch.nan, 2.0]), [0.0, 0.5])
        tensor([1.0000, 1.5000])
    """
    x_xN = x_xN.detach()
    if not x_xN.is_cpu or x_xN.dtype not in VIEWED:
        wide = torch.promote_types(x_xN.dtype, torch.float32)
        at_q = to_device(torch.tensor(at, dtype=wide), x_xN.device)
        return torch.nanquantile(x_xN.to(wide), at_q, dim=-1)
    x_xN = x_xN.contiguous()
    sorted_xN = np.sort(host_view(x_xN), axis=-1)  # NaN last
    known_x1 = sorted_xN.shape[-1] - np.isnan(sorted_xN).sum(-1, keepdims=True)
    rank_xq = (np.asarray(at) * (known_x1 - 1)).clip(0)
    ranks_xq = np.concatenate((np.floor(rank_xq), np.ceil(rank_xq)), -1).astype(int)
    found_xq = torch.from_numpy(np.take_along_axis(sorted_xN, ranks_xq, axis=-1))
    below_xq, above_xq = found_xq.chunk(2, -1)
    part_xq = torch.from_numpy(rank_xq % 1).to(x_xN.dtype)
    between_xq = torch.lerp(below_xq, above_xq, part_xq)
    found_xq = torch.where(part_xq == 0, below_xq, between_xq)  # 0 · inf is no number
    return found_xq.movedim(-1, 0)
