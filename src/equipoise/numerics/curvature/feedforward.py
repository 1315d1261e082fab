"""Feed-forward nets, plain and gated: hidden units bend one by one.

Axes, in this file:  N token · D, C input width · M hidden unit · O output width ·
Z what enters the hidden units: u alone (Z = M), or u and v of a gated net (Z = 2M).

y = h W_out, h = φ(u)∘v with u = x W_in and v = x W_up (gated), or v = 1 (plain). For a
cotangent g, n = g W_outᵀ reaches h; per unit ∂²/∂u² = n φ''(u) v, ∂²/∂u∂v = n φ'(u) and
∂²/∂v² = 0. All else is linear: weights of different units never meet.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.curvature.activations import Derivatives, derivatives


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Weights of x ↦ (φ(x W_in) ∘ x W_up) W_out; without W_up the net is plain.

    ``b_in_M`` is held fixed. To let a bias move, make it one more row of W_in, for a
    channel of x that is always one; the bias of the output is not curved.
    """

    w_in_DM: Tensor
    w_out_MO: Tensor
    w_up_DM: Tensor | None = None
    b_in_M: Tensor | None = None
    activation: str = "gelu"

    def __post_init__(self) -> None:
        up = self.w_in_DM if self.w_up_DM is None else self.w_up_DM
        if up.shape != self.w_in_DM.shape or self.w_in_DM.shape[1] != len(
            self.w_out_MO
        ):
            raise InputError(
                "a feed-forward net is W_in (D, M), W_up (D, M) if gated, W_out (M, O);"
                f" got {tuple(self.w_in_DM.shape)}, {tuple(up.shape)}, "
                f"{tuple(self.w_out_MO.shape)}"
            )

    @property
    def w_entering_DZ(self) -> Tensor:
        """Return W_in, with W_up beside it if the net is gated."""
        both = [self.w_in_DM] if self.w_up_DM is None else [self.w_in_DM, self.w_up_DM]
        return torch.cat(both, -1)


class Tangent(NamedTuple):
    """One tensor for x and for each weight: a tangent, or a product with one."""

    x_ND: Tensor
    w_in_DM: Tensor
    w_out_MO: Tensor
    w_up_DM: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """Values and cotangents at the hidden units of every token."""

    act: Derivatives
    up_NM: Tensor
    n_NM: Tensor
    gated: bool = False

    @property
    def h_NM(self) -> Tensor:
        """Return the hidden units themselves."""
        return self.act.value * self.up_NM

    @property
    def slope_NM(self) -> Tensor:
        """Return ∂h/∂u."""
        return self.act.first * self.up_NM

    @property
    def u_NM(self) -> Tensor:
        """Return the cotangent of u."""
        return self.n_NM * self.slope_NM

    @property
    def v_NM(self) -> Tensor:
        return self.n_NM * self.act.value

    @property
    def uu_NM(self) -> Tensor:
        return self.n_NM * self.act.second * self.up_NM

    @property
    def uv_NM(self) -> Tensor:
        return self.n_NM * self.act.first

    @property
    def slope_NZ(self) -> Tensor:
        """Return ∂h/∂u, and ∂h/∂v beside it."""
        both = [self.slope_NM, self.act.value] if self.gated else [self.slope_NM]
        return torch.cat(both, -1)

    @property
    def entering_NZ(self) -> Tensor:
        """Return the cotangent of u, and that of v beside it."""
        return torch.cat([self.u_NM, self.v_NM] if self.gated else [self.u_NM], -1)

    def bent(self, w_DZ: Tensor) -> Tensor:
        """Return w times ∂²/∂(u, v)² of one token's units."""
        if not self.gated:
            return w_DZ * self.uu_NM
        u_DM, v_DM = w_DZ.chunk(2, -1)
        return torch.cat([u_DM * self.uu_NM + v_DM * self.uv_NM, u_DM * self.uv_NM], -1)

    def at(self, token: int) -> "Unit":
        """Return the units of one token."""
        act = Derivatives(*(value_NM[token] for value_NM in self.act))
        return Unit(act, self.up_NM[token], self.n_NM[token], self.gated)


def feedforward_product(
    net: FeedForward,
    x_ND: Float[Tensor, "N D"],
    g_NO: Float[Tensor, "N O"],
    tangent: Tangent,
) -> Tangent:
    """Return ∇²⟨g, y⟩ times a tangent of x and the weights."""
    unit, up_DM = unit_at(net, x_ND, g_NO), net.w_up_DM
    du_NM = tangent.x_ND @ net.w_in_DM + x_ND @ tangent.w_in_DM
    dn_NM = g_NO @ tangent.w_out_MO.mT
    du_cot = dn_NM * unit.slope_NM + unit.uu_NM * du_NM
    dh_NM = unit.slope_NM * du_NM
    x_part, up_part = unit.u_NM @ tangent.w_in_DM.mT, None
    if up_DM is not None and tangent.w_up_DM is not None:
        dv_NM = tangent.x_ND @ up_DM + x_ND @ tangent.w_up_DM
        du_cot, dh_NM = du_cot + unit.uv_NM * dv_NM, dh_NM + unit.act.value * dv_NM
        dv_cot = dn_NM * unit.act.value + unit.uv_NM * du_NM
        x_part = x_part + dv_cot @ up_DM.mT + unit.v_NM @ tangent.w_up_DM.mT
        up_part = x_ND.mT @ dv_cot + tangent.x_ND.mT @ unit.v_NM
    return Tangent(
        du_cot @ net.w_in_DM.mT + x_part,
        x_ND.mT @ du_cot + tangent.x_ND.mT @ unit.u_NM,
        dh_NM.mT @ g_NO,
        up_part,
    )


def unit_at(net: FeedForward, x_ND: Tensor, g_NO: Tensor) -> Unit:
    """Return the hidden units of every token with their cotangents."""
    u_NM = x_ND @ net.w_in_DM
    act = derivatives(net.activation, u_NM if net.b_in_M is None else u_NM + net.b_in_M)
    up = torch.ones_like(act.value) if net.w_up_DM is None else x_ND @ net.w_up_DM
    return Unit(act, up, g_NO @ net.w_out_MO.mT, net.w_up_DM is not None)
