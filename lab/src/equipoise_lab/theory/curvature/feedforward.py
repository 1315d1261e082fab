"""The curvature of feed-forward nets, plain and gated: hidden units bend one by one.

Axes, in this file:  N token · D, C input width · M hidden unit · O output width ·
Z what enters the hidden units: u alone (Z = M), or u and v of a gated net (Z = 2M).

y = h W_out, h = φ(u)∘v with u = x W_in and v = x W_up (gated), or v = 1 (plain). For a
cotangent g, n = g W_outᵀ reaches h; per unit ∂²/∂u² = n φ''(u) v, ∂²/∂u∂v = n φ'(u) and
∂²/∂v² = 0. All else is linear: weights of different units never meet, so the blocks
are kept unit by unit.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.theory.activations import Derivatives, derivatives


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardCurvature:
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
class FeedForwardUnit:
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

    def at(self, token: int) -> "FeedForwardUnit":
        """Return the units of one token."""
        act = Derivatives(*(value_NM[token] for value_NM in self.act))
        return FeedForwardUnit(act, self.up_NM[token], self.n_NM[token], self.gated)


def feedforward_product(
    net: FeedForwardCurvature,
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


def unit_at(net: FeedForwardCurvature, x_ND: Tensor, g_NO: Tensor) -> FeedForwardUnit:
    """Return the hidden units of every token with their cotangents."""
    u_NM = x_ND @ net.w_in_DM
    act = derivatives(net.activation, u_NM if net.b_in_M is None else u_NM + net.b_in_M)
    up = torch.ones_like(act.value) if net.w_up_DM is None else x_ND @ net.w_up_DM
    return FeedForwardUnit(act, up, g_NO @ net.w_out_MO.mT, net.w_up_DM is not None)


class Gate(NamedTuple):
    """Blocks of W_up; with itself it has none."""

    in_up_MDC: Tensor
    up_out_MDO: Tensor
    x_up_NDCM: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardHessian:
    """The blocks of ∇²⟨g, y⟩ that are not zero; M stands once: units do not meet."""

    in_in_MDC: Tensor
    in_out_MDO: Tensor
    x_x_NDC: Tensor
    x_in_NDCM: Tensor
    x_out_NDMO: Tensor
    gate: Gate | None = None
    """What a gated net adds."""

    def dense(self) -> Float[Tensor, "P P"]:
        """Return the whole matrix over x, W_in, W_up (if gated) and W_out."""
        N, D, _ = self.x_x_NDC.shape
        M, _, out = self.in_out_MDO.shape
        hidden = D * M
        names = ["x", "in", *(["up"] if self.gate else []), "out"]
        sizes = {"x": N * D, "in": hidden, "up": hidden, "out": M * out}
        ends = torch.tensor([0] + [sizes[n] for n in names]).cumsum(0).tolist()
        place = dict(zip(names, ends, strict=False))
        whole = self.x_x_NDC.new_zeros(ends[-1], ends[-1])
        for (a, b), block in self._flat().items():
            rows, columns = block.shape
            whole[place[a] : place[a] + rows, place[b] : place[b] + columns] = block
            whole[place[b] : place[b] + columns, place[a] : place[a] + rows] = block.mT
        return whole

    def _flat(self) -> dict[tuple[str, str], Tensor]:
        eye_MM = torch.eye(len(self.in_in_MDC)).to(self.in_in_MDC)
        found = {
            ("x", "x"): torch.block_diag(*self.x_x_NDC),
            ("x", "in"): self.x_in_NDCM.flatten(2).flatten(0, 1),
            ("x", "out"): self.x_out_NDMO.flatten(2).flatten(0, 1),
            ("in", "in"): _spread(self.in_in_MDC, eye_MM, "MDC,ML->DMCL"),
            ("in", "out"): _spread(self.in_out_MDO, eye_MM, "MDO,ML->DMLO"),
        }
        if self.gate is not None:
            found |= {
                ("x", "up"): self.gate.x_up_NDCM.flatten(2).flatten(0, 1),
                ("in", "up"): _spread(self.gate.in_up_MDC, eye_MM, "MDC,ML->DMCL"),
                ("up", "out"): _spread(self.gate.up_out_MDO, eye_MM, "MDO,ML->DMLO"),
            }
        return found


def feedforward_hessian(
    net: FeedForwardCurvature, x_ND: Float[Tensor, "N D"], g_NO: Float[Tensor, "N O"]
) -> FeedForwardHessian:
    """Return all blocks of ∇²⟨g, y⟩ in x and the weights.

    Example:
        >>> one = torch.ones(1, 1)
        >>> net = FeedForwardCurvature(w_in_DM=one, w_out_MO=one, activation="silu")
        >>> feedforward_hessian(net, torch.zeros(1, 1), one).x_x_NDC
        tensor([[[0.5000]]])
    """
    unit = unit_at(net, x_ND, g_NO)
    gate_DM, up_DM = net.w_in_DM, net.w_up_DM
    bent_NDM = gate_DM * unit.uu_NM[:, None]
    moved_NDM = gate_DM * unit.slope_NM[:, None]
    plain = FeedForwardHessian(
        in_in_MDC=torch.einsum("ND,NC,NM->MDC", x_ND, x_ND, unit.uu_NM),
        in_out_MDO=torch.einsum("ND,NM,NO->MDO", x_ND, unit.slope_NM, g_NO),
        x_x_NDC=bent_NDM @ gate_DM.mT,
        x_in_NDCM=_input_block(x_ND, bent_NDM, unit.u_NM),
        x_out_NDMO=moved_NDM[..., None] * g_NO[:, None, None],
    )
    return plain if up_DM is None else _gated(plain, unit, net, x_ND, g_NO, up_DM)


def _gated(
    plain: FeedForwardHessian,
    unit: FeedForwardUnit,
    net: FeedForwardCurvature,
    x_ND: Tensor,
    g_NO: Tensor,
    up_DM: Tensor,
) -> FeedForwardHessian:
    up_NDM = up_DM * unit.uv_NM[:, None]
    gate_NDM = net.w_in_DM * unit.uv_NM[:, None]
    mixed_NDC = up_NDM @ net.w_in_DM.mT
    value_NDM = up_DM * unit.act.value[:, None]
    direct_NDCM = x_ND[:, None, :, None] * up_NDM[:, :, None]
    return replace(
        plain,
        x_x_NDC=plain.x_x_NDC + mixed_NDC + mixed_NDC.mT,
        x_in_NDCM=plain.x_in_NDCM + direct_NDCM,
        x_out_NDMO=plain.x_out_NDMO + value_NDM[..., None] * g_NO[:, None, None],
        gate=Gate(
            in_up_MDC=torch.einsum("ND,NC,NM->MDC", x_ND, x_ND, unit.uv_NM),
            up_out_MDO=torch.einsum("ND,NM,NO->MDO", x_ND, unit.act.value, g_NO),
            x_up_NDCM=_input_block(x_ND, gate_NDM, unit.v_NM),
        ),
    )


def _input_block(x_ND: Tensor, bent_NDM: Tensor, slope_NM: Tensor) -> Tensor:
    """Return bent_dm x_c + δ_dc slope_m for every token."""
    eye_DC = torch.eye(x_ND.shape[1]).to(x_ND)
    direct_NDCM = x_ND[:, None, :, None] * bent_NDM[:, :, None]
    return direct_NDCM + eye_DC[..., None] * slope_NM[:, None, None]


def _spread(block: Tensor, eye_MM: Tensor, how: str) -> Tensor:
    return torch.einsum(how, block, eye_MM).flatten(2).flatten(0, 1)


def feedforward_norms(
    net: FeedForwardCurvature, x_ND: Float[Tensor, "N D"], g_NO: Float[Tensor, "N O"]
) -> dict[str, float]:
    """Return ‖H(W_in, W_in)‖₂ and ‖H(W_in, W_out)‖₂, exactly: the worst unit's.

    Of a gated net W_in stands for W_in and W_up together. Blocks are Xᵀdiag(·)X and
    Xᵀdiag(·)G, of rank N at most: the orthogonal factor of Xᵀ and Gᵀ is left away, so
    that a unit costs what N tokens do.
    """
    unit = unit_at(net, x_ND, g_NO)
    x_AN, g_BN = (torch.linalg.qr(rows.mT, mode="r").R for rows in (x_ND, g_NO))

    def between(d_NM: Tensor, right_CN: Tensor) -> Tensor:
        found_MAC: Tensor = (x_AN * d_NM.mT[:, None]) @ right_CN.mT
        return found_MAC

    in_in, in_out = between(unit.uu_NM, x_AN), between(unit.slope_NM, g_BN)
    if unit.gated:
        both, value = between(unit.uv_NM, x_AN), between(unit.act.value, g_BN)
        above = torch.cat([in_in, both], -1)
        in_in = torch.cat([above, torch.cat([both, torch.zeros_like(both)], -1)], -2)
        in_out = torch.cat([in_out, value], -2)
    pairs = {"in_in": in_in, "in_out": in_out}
    norm = torch.linalg.matrix_norm
    return {name: float(norm(m, ord=2).max()) for name, m in pairs.items()}
