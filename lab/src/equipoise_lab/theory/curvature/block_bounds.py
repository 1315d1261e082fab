"""A bound on the curvature of a whole post-norm block, summed over its parts.

Axes, in this file:  x any leading axes · L token · D model width · M hidden unit ·
Z what enters the hidden units (M, or 2M in a gated net) · N weight matrix: Q, K, V of
each head, then W_in (with W_up, if the net is gated) and W_out.

The Hessian is Σ Jᵀ∇²⟨λ, φ⟩J over attention, norm, feed-forward net, norm and loss; each
adds a bound on its block (a, b) to the entry (a, b) of a matrix whose norm bounds ‖H‖.

Beyond attention tokens do not meet: f = x + attention(x) reaches the output as
y = LN₁(f), s = y + net(y), z = LN₂(s), row by row. A block is Σ_i l_i ⊗ M_i ⊗ r_i over
tokens, and M_i, the product of all that token i goes through, counts with the norm of
that product; only the sum over tokens is bounded. Of a factor C that attention is yet
to meet, CᵀC is kept.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.theory.curvature.norm import norm_hessian, norm_product
from equipoise.theory.lipschitz.forward import Mask, attend
from equipoise.theory.lipschitz.heads import Heads
from equipoise_lab.theory.curvature.attention_bounds import (
    AttentionNorms,
    all_finite,
    attention_norms,
    summed,
    top,
)
from equipoise_lab.theory.curvature.feedforward import (
    FeedForwardCurvature,
    FeedForwardUnit,
    feedforward_norms,
    unit_at,
)


class NormAt(NamedTuple):
    """A norm at one row: ∂LN/∂x, and ∇²⟨g, LN⟩."""

    slope_DD: Tensor
    bend_DD: Tensor


class Tokens(NamedTuple):
    """One token, or all of them stacked; of a factor C it is CᵀC."""

    bent_xDD: Tensor
    """|∂²/∂f²| of norm, net and norm together."""
    with_in_xDD: Tensor
    """∂²/∂f∂W_in, the factor at y."""
    first_xDD: Tensor
    """∂y/∂f, the factor at the cotangent of the hidden units in the same."""
    with_out_xDD: Tensor
    """∂²/∂f∂W_out, the factor at the cotangent of s."""
    with_hidden_xDD: Tensor
    """The factor at the hidden units in the same."""
    last_xDD: Tensor
    """∂z/∂f."""
    in_in_x: Tensor
    """‖·‖ of what the second norm bends at the hidden units,"""
    in_out_x: Tensor
    """between them and s,"""
    out_out_x: Tensor
    """and at s."""
    last_in_x: Tensor
    """‖∂z/∂u‖², u entering the hidden units."""
    last_out_x: Tensor
    """‖∂z/∂s‖²."""


def norms_at(x_LD: Tensor, g_LD: Tensor, *, gain_D: Tensor, eps: float) -> list[NormAt]:
    """Return the derivatives of LayerNorm at every row, g its cotangent."""
    bends = norm_hessian(x_LD, g_LD, gain_D=gain_D, eps=eps).x_x_xDE
    slopes = norm_hessian(x_LD, gain_D.expand_as(x_LD), eps=eps).x_gain_xDE.mT
    return [NormAt(*row) for row in zip(slopes, bends, strict=True)]


def token(
    net: FeedForwardCurvature, unit: FeedForwardUnit, norm_1: NormAt, norm_2: NormAt
) -> Tokens:
    """Return the products of one token, whose hidden units are given."""
    w_DZ, one_DD, bend_DD = net.w_entering_DZ, norm_1.slope_DD, norm_2.bend_DD
    M = len(net.w_out_MO)
    # u and v of a unit move the same h.
    hidden_DM = (w_DZ * unit.slope_NZ).unflatten(-1, (-1, M)).sum(-2)
    moved_DM, bent_DZ = one_DD.mT @ hidden_DM, one_DD.mT @ unit.bent(w_DZ)
    out_DZ = net.w_out_MO.mT.repeat(1, w_DZ.shape[1] // M) * unit.slope_NZ
    through_DD = one_DD + out_DZ @ w_DZ.mT @ one_DD
    bent_DD = norm_1.bend_DD + bent_DZ @ w_DZ.mT @ one_DD
    in_DZ = bent_DZ + through_DD.mT @ bend_DD @ out_DZ
    return Tokens(
        _absolute(bent_DD + through_DD.mT @ bend_DD @ through_DD),
        in_DZ @ in_DZ.mT,
        one_DD.mT @ one_DD,
        moved_DM @ moved_DM.mT,
        _gram(bend_DD @ through_DD),
        _gram(norm_2.slope_DD @ through_DD),
        *_own(out_DZ, norm_2),
    )


def _absolute(bent_DD: Tensor) -> Tensor:
    """Return |A|: ‖MᵀAN‖² ≤ ‖Mᵀ|A|M‖·‖Nᵀ|A|N‖."""
    values_D, vectors_DD = torch.linalg.eigh(bent_DD)
    absolute_DD: Tensor = (vectors_DD * values_D.abs()) @ vectors_DD.mT
    return absolute_DD


def _gram(c_DD: Tensor) -> Tensor:
    return c_DD.mT @ c_DD


def _own(out_DZ: Tensor, norm: NormAt) -> list[Tensor]:
    """Return what W_in and W_out see of the second norm and beyond."""
    root_AD = torch.linalg.qr(out_DZ.mT, mode="r").R
    bend_DD, slope_DD = norm.bend_DD, norm.slope_DD
    bent = [top(m) for m in (root_AD @ bend_DD @ root_AD.mT, root_AD @ bend_DD)]
    last = [top(root_AD @ slope_DD.mT) ** 2, top(slope_DD) ** 2]
    return [bend_DD.new_tensor(size) for size in (*bent, top(bend_DD), *last)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNormBlock:
    """z = LN₂(y + net(y)), y = LN₁(x + attention(x)); norms and biases are held."""

    heads: Heads
    net: FeedForwardCurvature
    gain_1_D: Tensor
    gain_2_D: Tensor
    shift_1_D: Tensor
    eps: float
    b_o_D: Tensor | float = 0.0
    b_out_D: Tensor | float = 0.0


@dataclass(frozen=True, slots=True)
class _Stream:
    """What flows through the block, and the cotangents on the way back."""

    first_LD: Tensor
    """x + attention(x)."""
    y_LD: Tensor
    second_LD: Tensor
    """y + net(y)."""
    unit: FeedForwardUnit
    to_y_LD: Tensor
    to_first_LD: Tensor
    to_second_LD: Tensor


def block_curvature_bound(block: PostNormBlock, *given: Any, **options: Any) -> float:
    """Return a bound on ‖H‖ over W_Q, W_K, W_V, W_in, W_up and W_out at one sequence.

    Its arguments are those of :func:`block_curvature_norms`.
    """
    whole_NN = block_curvature_norms(block, *given, **options)
    return top(whole_NN) if all_finite(whole_NN) else math.nan


def block_curvature_norms(
    block: PostNormBlock,
    x_LD: Float[Tensor, "L D"],
    g_LD: Float[Tensor, "L D"],
    *,
    loss_curvature: float,
    mask: Mask | None = None,
) -> Float[Tensor, "N N"]:
    """Return a bound on the norm of every block of H; all NaN if anything was.

    The order is Q, K, V of each head, then W_in (with W_up as one matrix, if the net is
    gated) and W_out. A weight that n heads share stands there n times, its copies tied
    by √n.

    Args:
        block: The weights; the net may be gated, queries and keys rotated.
        x_LD, g_LD: The input of the block, and the gradient of the loss at its output.
        loss_curvature: ‖∇²ℓ‖ at the output.
        mask: As for ``attend``.
    """
    stream = _stream(block, x_LD, g_LD, mask=mask)
    # The last of the backward pass: whatever is broken has reached it.
    if not all_finite(stream.to_first_LD):
        size = 3 * len(block.heads.w_q_HDE) + 2
        return torch.full((size, size), math.nan)
    norms = attention_norms(block.heads, x_LD, stream.to_first_LD, mask=mask)
    tokens = _tokens(block, stream, g_LD)
    met_NN = _met(block.net, stream, tokens, norms=norms)
    whole_NN = _padded(norms.functional_NN) + met_NN
    bent_N = _padded(norms.jacobian(tokens.bent_xDD))
    last_N = _last(stream, tokens, norms)
    loss_NN = loss_curvature * torch.outer(last_N, last_N)
    return whole_NN + torch.outer(bent_N, bent_N) + loss_NN


def _tokens(block: PostNormBlock, stream: _Stream, g_LD: Tensor) -> Tokens:
    eps, unit = block.eps, stream.unit
    one = norms_at(stream.first_LD, stream.to_y_LD, gain_D=block.gain_1_D, eps=eps)
    two = norms_at(stream.second_LD, g_LD, gain_D=block.gain_2_D, eps=eps)
    each = [
        token(block.net, unit.at(i), *norms)
        for i, norms in enumerate(zip(one, two, strict=True))
    ]
    return Tokens(*(torch.stack(rows) for rows in zip(*each, strict=True)))


def _padded(m: Tensor) -> Tensor:
    """Return the same with zeros for W_in and W_out."""
    return torch.nn.functional.pad(m, (0, 2) * m.ndim)


def _stream(
    block: PostNormBlock, x_LD: Tensor, g_LD: Tensor, *, mask: Mask | None
) -> _Stream:
    heads, net = block.heads, block.net
    first_LD = x_LD + (attend(heads, x_LD, mask=mask).o_HQF @ heads.w_o_HFD).sum(0)
    first_LD = first_LD + block.b_o_D
    y_LD = _normed(first_LD, block.gain_1_D, block.eps) + block.shift_1_D
    still_LD = y_LD.new_zeros(len(y_LD), net.w_out_MO.shape[1])
    second_LD = y_LD + unit_at(net, y_LD, still_LD).h_NM @ net.w_out_MO
    second_LD = second_LD + block.b_out_D
    to_second_LD = _back(second_LD, g_LD, block.gain_2_D, block.eps)
    unit = unit_at(net, y_LD, to_second_LD)
    to_y_LD = to_second_LD + unit.entering_NZ @ net.w_entering_DZ.mT
    to_first_LD = _back(first_LD, to_y_LD, block.gain_1_D, block.eps)
    return _Stream(first_LD, y_LD, second_LD, unit, to_y_LD, to_first_LD, to_second_LD)


def _normed(x_LD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x_LD, gain_D.shape, gain_D, eps=eps)


def _back(x_LD: Tensor, g_LD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """Return Jᵀ(γ∘g): what a unit of γ along g would do to the gradient."""
    still_LD = torch.zeros_like(x_LD)
    ones_D, gg_LD = torch.ones_like(gain_D), g_LD * gain_D
    return norm_product(x_LD, gg_LD, still_LD, dgain_D=ones_D, eps=eps).x_xD


def _last(stream: _Stream, tokens: Tokens, norms: AttentionNorms) -> Tensor:
    """Return ‖∂z/∂W‖ of every weight."""
    y, h = stream.y_LD, stream.unit.h_NM
    of_in, of_out = summed(tokens.last_in_x, y, y), summed(tokens.last_out_x, h, h)
    own = torch.stack([of_in, of_out]).sqrt()
    return torch.cat([norms.jacobian(tokens.last_xDD), own.to(norms.tied_N)])


def _met(
    net: FeedForwardCurvature, stream: _Stream, tokens: Tokens, *, norms: AttentionNorms
) -> Tensor:
    """Return what bends beyond attention and meets W_in or W_out."""
    unit, y, g, h = stream.unit, stream.y_LD, stream.to_second_LD, stream.unit.h_NM
    with_in = norms.crossed(tokens.with_in_xDD, y)
    with_in = with_in + norms.crossed(tokens.first_xDD, unit.entering_NZ)
    with_out = norms.crossed(tokens.with_out_xDD, g)
    with_out = with_out + norms.crossed(tokens.with_hidden_xDD, h)
    own = feedforward_norms(net, y, g)
    whole_NN = with_in.new_zeros(len(with_in) + 2, len(with_in) + 2)
    whole_NN[:-2, -2], whole_NN[:-2, -1] = with_in, with_out
    whole_NN[-2, -1] = own["in_out"] + summed(tokens.in_out_x, y, h)
    whole_NN = whole_NN + whole_NN.mT
    whole_NN[-2, -2] = own["in_in"] + summed(tokens.in_in_x, y, y)
    whole_NN[-1, -1] = summed(tokens.out_out_x, h, h)
    return whole_NN
