"""A bound on the Hessian of a whole post-norm block, summed over its nodes.

Axes, in this file:  L token · D model width · M hidden unit · N weight matrix: Q, K, V
of each head, then W_in and W_out.

The Hessian is Σ Jᵀ∇²⟨λ, φ⟩J over attention, norm, feed-forward net, norm and loss; each
node adds a bound on its block (a, b) to the entry (a, b) of a matrix whose norm bounds
‖H‖. Beyond attention tokens do not meet, so a node is a sum over tokens of small
matrices: token i counts with the norm of its own, and not with that of the worst.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.curvature.attention_bounds import (
    AttentionNorms,
    all_finite,
    attention_norms,
    top,
)
from equipoise.numerics.curvature.feedforward import FeedForward, Unit, unit_at
from equipoise.numerics.curvature.feedforward_blocks import feedforward_norms
from equipoise.numerics.curvature.norm import norm_curvature, norm_product
from equipoise.numerics.lipschitz.forward import Mask, attend
from equipoise.numerics.lipschitz.heads import Heads


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNormBlock:
    """z = LN₂(y + net(y)), y = LN₁(x + attention(x)); norms and biases are held."""

    heads: Heads
    net: FeedForward
    gain_1_D: Tensor
    gain_2_D: Tensor
    shift_1_D: Tensor
    eps: float
    b_o_D: Tensor | None = None
    b_out_D: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Stream:
    """What flows through the block, and the cotangents on the way back."""

    first_LD: Tensor
    """x + attention(x)."""
    y_LD: Tensor
    second_LD: Tensor
    """y + net(y)."""
    unit: Unit
    to_y_LD: Tensor
    to_first_LD: Tensor
    to_second_LD: Tensor


def block_curvature_bound(
    block: PostNormBlock,
    x_LD: Float[Tensor, "L D"],
    g_LD: Float[Tensor, "L D"],
    *,
    loss_curvature: float,
    mask: Mask | None = None,
) -> float:
    """Return a bound on ‖H‖ over (W_Q, W_K, W_V, W_in, W_out) at one sequence.

    Args:
        block: The weights; the net is plain (not gated).
        x_LD, g_LD: What the block reads, and the gradient of the loss at what it says.
        loss_curvature: ‖∇²ℓ‖ at the output.
        mask: As for ``attend``.
    """
    if block.net.w_up_DM is not None:
        raise InputError("the bound on a block is for a plain net, not a gated one")
    weights = (*block.heads.weights, block.net.w_in_DM, block.net.w_out_MO)
    if not all_finite(x_LD, g_LD, *weights):
        return math.nan
    stream = _stream(block, x_LD, g_LD, mask=mask)
    norms = attention_norms(block.heads, x_LD, stream.to_first_LD, mask=mask)
    rows = _rows(block, stream, g_LD)
    bend_1_L = _bend(stream.first_LD, stream.to_y_LD, block.gain_1_D, block.eps)
    bend_2_L = _bend(stream.second_LD, g_LD, block.gain_2_D, block.eps)
    last_L = loss_curvature * rows.slope_2_L.square()
    whole_NN = _padded(norms.functional_NN)
    j_N = _padded(norms.jacobian(bend_1_L.sqrt()))
    whole_NN = whole_NN + torch.outer(j_N, j_N)
    whole_NN = whole_NN + _net(block.net, stream, rows, norms)
    for weight_L in (bend_2_L.sqrt(), last_L.sqrt()):
        j_N = _at_second(stream, rows, norms, weight_L)
        whole_NN = whole_NN + torch.outer(j_N, j_N)
    return top(whole_NN)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Norms of what each token's own matrices do, one number per token."""

    slope_1_L: Tensor
    """Of the first norm."""
    slope_2_L: Tensor
    through_L: Tensor
    """Of 1 + net'."""
    out_L: Tensor
    """Of net' without W_in."""


def _rows(block: PostNormBlock, stream: _Stream, g_LD: Tensor) -> _Rows:
    slope_LM, w_in, w_out = stream.unit.slope_NM, block.net.w_in_DM, block.net.w_out_MO
    eye_DD = torch.eye(len(w_in)).to(w_in)
    through = [top(eye_DD + (w_in * s_M) @ w_out) for s_M in slope_LM]
    out = [top(s_M[:, None] * w_out) for s_M in slope_LM]
    return _Rows(
        _steepest(stream.first_LD, block.gain_1_D, block.eps),
        _steepest(stream.second_LD, block.gain_2_D, block.eps),
        g_LD.new_tensor(through),
        g_LD.new_tensor(out),
    )


def _padded(m: Tensor) -> Tensor:
    """Return the same with zeros for W_in and W_out."""
    return torch.nn.functional.pad(m, (0, 2) * m.ndim)


def _stream(
    block: PostNormBlock, x_LD: Tensor, g_LD: Tensor, *, mask: Mask | None
) -> _Stream:
    heads, net = block.heads, block.net
    first_LD = x_LD + (attend(heads, x_LD, mask=mask).o_HQF @ heads.w_o_HFD).sum(0)
    first_LD = first_LD if block.b_o_D is None else first_LD + block.b_o_D
    y_LD = _normed(first_LD, block.gain_1_D, block.eps) + block.shift_1_D
    hidden_LM = unit_at(net, y_LD, y_LD.new_zeros(len(y_LD), net.w_out_MO.shape[1])).act
    second_LD = y_LD + hidden_LM.value @ net.w_out_MO
    second_LD = second_LD if block.b_out_D is None else second_LD + block.b_out_D
    to_second_LD = _back(second_LD, g_LD, block.gain_2_D, block.eps)
    unit = unit_at(net, y_LD, to_second_LD)
    to_y_LD = to_second_LD + unit.u_NM @ net.w_in_DM.mT
    to_first_LD = _back(first_LD, to_y_LD, block.gain_1_D, block.eps)
    return _Stream(first_LD, y_LD, second_LD, unit, to_y_LD, to_first_LD, to_second_LD)


def _normed(x_LD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x_LD, gain_D.shape, gain_D, eps=eps)


def _back(x_LD: Tensor, g_LD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """Return Jᵀ(γ∘g): what a unit of γ along g would do to the gradient."""
    still_LD = torch.zeros_like(x_LD)
    ones_D, gg_LD = torch.ones_like(gain_D), g_LD * gain_D
    return norm_product(x_LD, gg_LD, still_LD, dgain_D=ones_D, eps=eps).x_xD


def _steepest(x_LD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """Return ‖γ‖_∞/s of each row, at least ‖∂LN/∂x‖ there."""
    std_L = x_LD.std(-1, correction=0)
    return gain_D.abs().max() / (std_L.square() + eps).sqrt()


def _bend(x_LD: Tensor, g_LD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    return norm_curvature(x_LD, g_LD, gain_D=gain_D, eps=eps)


def _at_second(
    stream: _Stream, rows: _Rows, norms: AttentionNorms, weight_L: Tensor
) -> Tensor:
    """Return ‖∂(y + net(y))/∂W‖ of every weight, rows weighted."""
    j_N = norms.jacobian(weight_L * rows.through_L * rows.slope_1_L)
    w_in = top((weight_L * rows.out_L)[:, None] * stream.y_LD)
    w_out = top(weight_L[:, None] * stream.unit.act.value)
    return torch.cat([j_N, j_N.new_tensor([w_in, w_out])])


def _net(
    net: FeedForward, stream: _Stream, rows: _Rows, norms: AttentionNorms
) -> Tensor:
    """Return what the net itself bends, over all weights."""
    unit, y_LD, g_LD, w_in = stream.unit, stream.y_LD, stream.to_second_LD, net.w_in_DM
    bent_L = y_LD.new_tensor([top(w_in * row_M) for row_M in unit.uu_NM])
    moved_L = y_LD.new_tensor([top(w_in * row_M) for row_M in unit.slope_NM])
    y_y_L = y_LD.new_tensor([top((w_in * row_M) @ w_in.mT) for row_M in unit.uu_NM])
    size_L = torch.linalg.vector_norm(unit.u_NM, dim=-1)
    one_LM = unit.u_NM / size_L.clamp_min(torch.finfo(size_L.dtype).tiny)[:, None]
    j_N = _padded(norms.jacobian(rows.slope_1_L * y_y_L.sqrt()))
    whole_NN = torch.outer(j_N, j_N)
    with_in_N = _crossed(rows, norms, bent_L, y_LD)
    with_in_N = with_in_N + _crossed(rows, norms, size_L, one_LM)
    whole_NN[:-2, -2] = whole_NN[-2, :-2] = with_in_N
    whole_NN[:-2, -1] = whole_NN[-1, :-2] = _crossed(rows, norms, moved_L, g_LD)
    own = feedforward_norms(net, y_LD, g_LD)
    whole_NN[-2, -2] = own["in_in"]
    whole_NN[-1, -2] = whole_NN[-2, -1] = own["in_out"]
    return whole_NN


def _crossed(
    rows: _Rows, norms: AttentionNorms, size_L: Tensor, right_LD: Tensor
) -> Tensor:
    """Return the bound on Σ_i J_iᵀ M_i ⊗ r_i, ‖M_i‖ = size: half of it on each side."""
    # ‖∂y_i‖ ≤ slope·‖∂first_i‖: the slope is shared out as well.
    half_L = (rows.slope_1_L * size_L).sqrt()
    return norms.jacobian(half_L) * top(half_L[:, None] * right_LD)
