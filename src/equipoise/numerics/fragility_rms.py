"""How large the low-precision error of an attention head will be, in the mean square.

Axes, in this file: x batch and heads · Q query · K key · d head width · D model width.

Every stored tensor is rounded once and sums are wide. To first order each rounding
residual travels to the output on its own, and residuals are as good as independent, so
their squares add. With projected values ṽⱼ = vⱼW, outputs oᵢ = Σⱼ pᵢⱼṽⱼ, w(x) the
squared residual of rounding x, and c the score scale, the terms of E‖ΔO‖² are

    query    Σ w(qᵢₖ) c² ‖Σⱼ pᵢⱼ kⱼₖ (ṽⱼ - oᵢ)‖²
    key      Σ w(kⱼₖ) c² qᵢₖ² pᵢⱼ² ‖ṽⱼ - oᵢ‖²
    score    Σ w(sᵢⱼ) pᵢⱼ² ‖ṽⱼ - oᵢ‖²
    prob     Σ w(pᵢⱼ) ‖ṽⱼ‖²  +  ‖systematic part‖², see below
    value    Σ w(vⱼₖ) pᵢⱼ² ‖W[k]‖²
    mix      Σ w(aᵢₖ) ‖W[k]‖²
    weight   Σ w(Wₖₘ) aᵢₖ²
    output   Σ w(oᵢₘ).

The query term is coherent over keys (one residual moves a whole row of scores) and has
no cheap closed form: it is estimated by random output probes, without bias.
A row of nearly equal probabilities is rounded the same way at every key, so ``prob``
also carries what the mean residual r̄ᵢ of the row does: ‖r̄ᵢ Σⱼ ṽⱼ‖².
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.formats import Format
from equipoise.numerics.rounding import rounded, rounding_variance


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadError:
    """E‖ΔO‖² of each head, by the stored tensor the error enters through."""

    query: Tensor
    key: Tensor
    score: Tensor
    prob: Tensor
    value: Tensor
    mix: Tensor
    weight: Tensor
    output: Tensor
    norm: Tensor
    """‖O‖_F, what relative errors are relative to."""

    @property
    def terms(self) -> dict[str, Tensor]:
        names = [f.name for f in fields(self) if f.name != "norm"]
        return {name: getattr(self, name) for name in names}

    @property
    def relative(self) -> Tensor:
        """Return √E‖ΔO‖² / ‖O‖_F; infinite where the head writes nothing."""
        total: Tensor = torch.stack(list(self.terms.values())).sum(0)
        return total.sqrt() / self.norm


def head_error(
    qkv: tuple[
        Float[Tensor, "*x Q d"], Float[Tensor, "*x K d"], Float[Tensor, "*x K d"]
    ],
    w_xdD: Float[Tensor, "*x d D"],
    *,
    format: Format,
    generator: torch.Generator,
    scale: float | None = None,
    visible_QK: Tensor | None = None,
    probes: int = 2,
) -> HeadError:
    """Return the predicted mean square error of softmax(c·QKᵀ)V·W in a format.

    Args:
        qkv: queries, keys and values in float32 or float64.
        w_xdD: each head's rows of the output projection.
        format: where q, k, v, scores, probabilities, PV, W and the result are stored.
        generator: draws the probes of the query term.
        scale: score scale c; 1/√d when not given.
        visible_QK: True where a query may see a key.
        probes: probes of the query term, which deviates by about √(2/(probes·Q)).

    Assumes small errors (|Δs| ≪ 1), no overflow, and residuals independent across
    entries: identical tokens break the last, and read up to 1.7 times too low.
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
    gain_xd = gram_xdd.diagonal(dim1=-2, dim2=-1)[..., None, :]
    # p²‖ṽ-o‖², with values centred first: a common offset must cancel exactly.
    centre = v_xKd.mean(-2, keepdim=True)
    spread_xQK = p_xQK.square() * _distances(a_xQd - centre, v_xKd - centre, gram_xdd)

    def w(x: Tensor) -> Tensor:
        return rounding_variance(x, format)

    def total(x: Tensor) -> Tensor:
        return x.sum((-2, -1))

    key_xQK = q_xQd.square() @ w(k_xKd).mT
    value_xKd = p_xQK.square().mT @ torch.ones_like(a_xQd) * w(v_xKd)
    return HeadError(
        query=_query_term(qkv, p_xQK, w_xdD, w(q_xQd), generator, probes) * c**2,
        key=total(key_xQK * spread_xQK) * c**2,
        score=total(w(s_xQK) * spread_xQK),
        prob=_prob_term(p_xQK, v_xKd, gram_xdd, format),
        value=total(value_xKd * gain_xd),
        mix=total(w(a_xQd) * gain_xd),
        weight=total(a_xQd.square().sum(-2)[..., None] * w(w_xdD)),
        output=total(w(o_xQD)),
        norm=total(o_xQD.square()).sqrt(),
    )


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


def _query_term(
    qkv: tuple[Tensor, Tensor, Tensor],
    p_xQK: Tensor,
    w_xdD: Tensor,
    variance_xQd: Tensor,
    generator: torch.Generator,
    probes: int,
) -> Tensor:
    """Return Σ w(q)·(gradient of a random projection of O with respect to q)²."""
    _, k_xKd, v_xKd = qkv
    shape = (*p_xQK.shape[:-1], w_xdD.shape[-1])
    total = torch.zeros(p_xQK.shape[:-2], dtype=p_xQK.dtype, device=p_xQK.device)
    for _ in range(probes):
        z_xQD = torch.randn(shape, generator=generator, dtype=p_xQK.dtype).to(p_xQK)
        g_xQK = (z_xQD @ w_xdD.mT) @ v_xKd.mT
        g_xQK = p_xQK * (g_xQK - (p_xQK * g_xQK).sum(-1, keepdim=True))
        total = total + (variance_xQd * (g_xQK @ k_xKd).square()).sum((-2, -1))
    return total / probes
