"""How large the low-precision error of an attention head will be, to first order.

Axes, in this file: x batch and heads · Q query · K key · d head width · D model width.

Every stored tensor is rounded once and sums are wide. What the head is given (q, k, v
and W) is rounded before anything else, so those residuals r are known exactly and are
carried through the head's derivative, signs and all:

    ΔS = c(r_q Kᵀ + Q r_kᵀ),   ΔP = P∘(ΔS - rowsum(P∘ΔS)),
    ΔO = (ΔP·V + P·r_v)W + A·r_W.

What the head makes (S, P, A, O) is rounded after it has moved, so only the size of
those residuals is known: as good as independent, their squares add. With w(x) the
squared residual of rounding x, ṽⱼ = vⱼW and oᵢ = Σⱼ pᵢⱼṽⱼ,

    score    Σ w(sᵢⱼ) pᵢⱼ² ‖ṽⱼ - oᵢ‖²
    prob     Σ w(pᵢⱼ) ‖ṽⱼ‖²  +  ‖r̄ᵢ Σⱼ ṽⱼ‖²
    mix      Σ w(aᵢₖ) ‖W[k]‖²
    output   Σ w(oᵢₘ).

A row of nearly equal probabilities is rounded the same way at every key: r̄ᵢ is the mean
residual of the row, and w is taken about it.

What low precision does to LayerNorm and RMSNorm, token by token.

Axes, in this file: x tokens · D model width.

z = (x - μ)/√(v+ε). Three separate questions, which one number in print (ρ_LN) mixes:

    κ_LN = ‖x‖/(√D σ) ≥ 1       how much cancelling the mean amplifies input rounding;
                                it does not depend on ε
    r_ε  = ε/(v+ε) ∈ (0, 1)     whether ε, not the token, sets the scale
    ρ̃_LN = (1-r_ε)·D·u_stat     relative error of the statistics themselves, u_stat
                                being the precision they are summed in.

How much of a tensor falls outside what a format can hold.

Axes, in this file: x any.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.formats import Format
from equipoise.numerics.rounding import PIECE, rounded, rounding_variance

Heads = tuple[Float[Tensor, "*x Q d"], Float[Tensor, "*x K d"], Float[Tensor, "*x K d"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadError:
    """E‖ΔO‖² of each head, by the stored tensor the error enters through."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    inputs: Tensor
    """The four above at once: their errors are known, and may cancel or add."""
    score: Tensor
    prob: Tensor
    mix: Tensor
    output: Tensor
    norm: Tensor
    """‖O‖_F, what relative errors are relative to."""

    @property
    def terms(self) -> dict[str, Tensor]:
        """Return each tensor's contribution on its own."""
        names = [f.name for f in fields(self) if f.name not in {"norm", "inputs"}]
        return {name: getattr(self, name) for name in names}

    @property
    def relative(self) -> Tensor:
        """Return √E‖ΔO‖² / ‖O‖_F; infinite where the head writes nothing."""
        total = self.inputs + self.score + self.prob + self.mix + self.output
        return total.sqrt() / self.norm


def head_error(
    qkv: Heads,
    w_xdD: Float[Tensor, "*x d D"],
    *,
    format: Format,
    scale: float | None = None,
    visible_QK: Tensor | None = None,
) -> HeadError:
    """Return the predicted mean square error of softmax(c·QKᵀ)V·W in a format.

    Args:
        qkv: queries, keys and values in float32 or float64.
        w_xdD: each head's rows of the output projection.
        format: where q, k, v, scores, probabilities, PV, W and the result are stored.
        scale: score scale c; 1/√d when not given.
        visible_QK: True where a query may see a key.

    Assumes small errors (|Δs| ≪ 1) and no overflow.
    """
    q_xQd, k_xKd, v_xKd = qkv
    if q_xQd.shape[-1] != k_xKd.shape[-1] or k_xKd.shape[-2] != v_xKd.shape[-2]:
        raise InputError(
            f"head_error: q {tuple(q_xQd.shape)}, k {tuple(k_xKd.shape)} and "
            f"v {tuple(v_xKd.shape)} do not fit together"
        )
    c = q_xQd.shape[-1] ** -0.5 if scale is None else scale
    s_xQK = c * (q_xQd @ k_xKd.mT)
    if visible_QK is not None:
        s_xQK = s_xQK.masked_fill(~visible_QK, -torch.inf)
    p_xQK = s_xQK.softmax(-1)
    a_xQd = p_xQK @ v_xKd
    o_xQD = a_xQd @ w_xdD
    gram_xdd = w_xdD @ w_xdD.mT

    def residual(x: Tensor) -> Tensor:
        return rounded(x, format) - x

    def carried(ds_xQK: Tensor) -> Tensor:
        moved = p_xQK * ds_xQK
        return (moved - p_xQK * moved.sum(-1, keepdim=True)) @ v_xKd @ w_xdD

    parts = {
        "query": carried(c * (residual(q_xQd) @ k_xKd.mT)),
        "key": carried(c * (q_xQd @ residual(k_xKd).mT)),
        "value": p_xQK @ residual(v_xKd) @ w_xdD,
        "weight": a_xQd @ residual(w_xdD),
    }
    gain_xd = gram_xdd.diagonal(dim1=-2, dim2=-1)[..., None, :]
    return HeadError(
        **{name: _power(moved) for name, moved in parts.items()},
        inputs=_power(torch.stack(list(parts.values())).sum(0)),
        score=_score_term(s_xQK, p_xQK, (a_xQd, v_xKd, gram_xdd), format),
        prob=_prob_term(p_xQK, v_xKd, gram_xdd, format),
        mix=(rounding_variance(a_xQd, format) * gain_xd).sum((-2, -1)),
        output=rounding_variance(o_xQD, format).sum((-2, -1)),
        norm=_power(o_xQD).sqrt(),
    )


def _power(x: Tensor) -> Tensor:
    return x.square().sum((-2, -1))


def _score_term(
    s_xQK: Tensor, p_xQK: Tensor, mixed: tuple[Tensor, Tensor, Tensor], format: Format
) -> Tensor:
    a_xQd, v_xKd, gram_xdd = mixed
    # Values are centred first: a common offset must cancel exactly.
    centre = v_xKd.mean(-2, keepdim=True)
    spread_xQK = _distances(a_xQd - centre, v_xKd - centre, gram_xdd)
    weight_xQK = p_xQK.square() * spread_xQK
    return (rounding_variance(s_xQK, format) * weight_xQK).sum((-2, -1))


def _distances(a_xQd: Tensor, v_xKd: Tensor, gram_xdd: Tensor) -> Tensor:
    """Return ‖(vⱼ - aᵢ)W‖² from WWᵀ: d² work instead of D·d."""
    cross_xQK = a_xQd @ gram_xdd @ v_xKd.mT
    return (
        _squares(a_xQd, gram_xdd)[..., None]
        - 2 * cross_xQK
        + _squares(v_xKd, gram_xdd)[..., None, :]
    ).clamp(min=0)


def _squares(x_xNd: Tensor, gram_xdd: Tensor) -> Tensor:
    return ((x_xNd @ gram_xdd) * x_xNd).sum(-1)


def _prob_term(
    p_xQK: Tensor, v_xKd: Tensor, gram_xdd: Tensor, format: Format
) -> Tensor:
    residual_xQK = rounded(p_xQK, format) - p_xQK
    visible_xQK = (p_xQK > 0).to(p_xQK.dtype)
    count_xQ1 = visible_xQK.sum(-1, keepdim=True)
    mean_xQ1 = residual_xQK.sum(-1, keepdim=True) / count_xQ1
    scatter_xQK = (residual_xQK - mean_xQ1 * visible_xQK).square()
    together_xQ = _squares(mean_xQ1 * (visible_xQK @ v_xKd), gram_xdd)
    alone_xQ = (scatter_xQK * _squares(v_xKd, gram_xdd)[..., None, :]).sum(-1)
    return (together_xQ + alone_xQ).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormCondition:
    """One value per token."""

    cancellation: Float[Tensor, "*x"]
    """κ_LN; 1 for RMSNorm; infinite for a constant token."""
    epsilon_share: Float[Tensor, "*x"]
    """r_ε."""
    statistics_error: Float[Tensor, "*x"]
    """ρ̃_LN."""


def norm_condition(
    x_xD: Float[Tensor, "*x D"],
    *,
    eps: float,
    statistics: Format,
    centred: bool = True,
) -> NormCondition:
    """Return κ_LN, r_ε and ρ̃_LN of every token.

    Args:
        x_xD: what enters the norm.
        eps: the norm's ε.
        statistics: the format its sums are accumulated in; fp32 in stock kernels.
        centred: LayerNorm; False for RMSNorm, which has no mean to cancel.

    Example:
        >>> from equipoise.numerics.formats import FORMATS
        >>> x = torch.tensor([[1.0, -1.0], [101.0, 99.0]])
        >>> norm_condition(x, eps=1.0, statistics=FORMATS["fp32"]).cancellation
        tensor([  1.0000, 100.0050])
    """
    x_xD = x_xD.to(torch.promote_types(x_xD.dtype, torch.float32))
    D = x_xD.shape[-1]
    power_x = x_xD.square().mean(-1)
    v_x = x_xD.var(-1, correction=0) if centred else power_x
    # The variance of a constant token is 0 on one CPU and rounding, some ε², on another
    flat_x = power_x * (16 * torch.finfo(x_xD.dtype).eps) ** 2
    return NormCondition(
        cancellation=(power_x / v_x).sqrt().where(~(v_x <= flat_x), torch.inf),
        epsilon_share=eps / (v_x + eps),
        statistics_error=v_x / (v_x + eps) * D * statistics.unit_roundoff,
    )


def epsilon_stored(eps: float, format: Format) -> float:
    """Return what is left of ε in a format: 1e-8 is 0 in fp16, 1e-5 is subnormal.

    Example:
        >>> from equipoise.numerics.formats import FORMATS
        >>> epsilon_stored(1e-8, FORMATS["fp16"])
        0.0
    """
    wide = torch.tensor([eps], dtype=torch.float64)
    return float(rounded(wide, format).item())


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeUse:
    """Shares of the finite, non-zero entries of a tensor, each in [0, 1]."""

    overflow: float
    """Beyond the largest number: infinite, or clipped where the format saturates."""
    subnormal: float
    """Below the normal range, zero excluded: relative accuracy is being lost."""
    flushed: float
    """At most half the smallest subnormal: rounded to 0."""


def range_use(x: Float[Tensor, "*x"], format: Format) -> RangeUse:
    """Return which shares of x overflow, go subnormal, or vanish in a format.

    A tensor with no finite non-zero entry uses no range: NaN, not 0.

    Example:
        >>> import torch
        >>> from equipoise.numerics.formats import FORMATS
        >>> x = torch.tensor([1.0, 1e5, 1e-5, 1e-9])
        >>> range_use(x, FORMATS["fp16"])
        RangeUse(overflow=0.25, subnormal=0.5, flushed=0.25)
    """
    # Half a step past the largest still rounds back to it.
    edge = format.largest * (1 + format.unit_roundoff / (2 - format.spacing))
    count, beyond, small, lost = 0, 0, 0, 0
    for piece in x.detach().reshape(-1).split(PIECE):
        size = piece.abs()
        low, high = size.aminmax() if len(size) else (size, size)
        if bool((low >= format.smallest_normal) & (high <= format.largest)):
            count += len(size)  # the usual piece: all of it in the normal range
            continue
        used = size[(size > 0) & (size < torch.inf)]  # NaN is neither
        over = used > format.largest if format.finite_only else used >= edge
        count += len(used)
        beyond += int(torch.count_nonzero(over))
        small += int(torch.count_nonzero(used < format.smallest_normal))
        lost += int(torch.count_nonzero(used <= format.smallest_subnormal / 2))
    return RangeUse(
        overflow=beyond / count if count else torch.nan,
        subnormal=small / count if count else torch.nan,
        flushed=lost / count if count else torch.nan,
    )
