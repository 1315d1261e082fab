"""Beyond attention, one token of a post-norm block: products of its own matrices.

Axes, in this file:  x any leading axes · L token · D model width · M hidden unit ·
Z what enters the hidden units (M, or 2M in a gated net).

f = x + attention(x) reaches the output as y = LN₁(f), s = y + net(y), z = LN₂(s), row
by row, so that everything beyond f is a function of f_i, W_in and W_out alone. Norms
are taken of products; of a factor C that attention is yet to meet, CᵀC is kept.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.numerics.curvature.attention_bounds import top
from equipoise.numerics.curvature.feedforward import FeedForward, Unit
from equipoise.numerics.curvature.norm import norm_hessian


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


def token(net: FeedForward, unit: Unit, norm_1: NormAt, norm_2: NormAt) -> Tokens:
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
