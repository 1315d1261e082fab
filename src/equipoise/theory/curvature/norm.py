"""The curvature of LayerNorm and RMSNorm: rank two plus a projector.

Axes, in this file:  x any leading axes · D, E channel.

One row with m = x − mean(x) (RMSNorm: m = x), s = √(‖m‖²/D + ε), x̂ = m/s and the
projector C that takes the mean (RMSNorm: C = I). J = (C − x̂x̂ᵀ/D)/s is the derivative of
x̂. For y = γ∘x̂ + β and a cotangent g, with ĝ = γ∘g, r = Jĝ and q = ĝᵀx̂:

    ∇²ₓ⟨g, y⟩ = −(x̂rᵀ + rx̂ᵀ + qJ)/(D·s)    ∂²⟨g, y⟩/∂x∂γ = J·diag(g)

for every ε ≥ 0; nothing depends on β.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError

Rows = Float[Tensor, "*x D"]
Gain = Float[Tensor, " D"] | None


class NormProduct(NamedTuple):
    """∇²⟨g, y⟩ times a tangent: the part at x, and the part at γ (summed over rows)."""

    x_xD: Tensor
    gain_D: Tensor


class NormHessian(NamedTuple):
    """Rows do not mix: one block per row. ∂²/∂γ² is zero."""

    x_x_xDE: Tensor
    x_gain_xDE: Tensor


@dataclass(frozen=True, slots=True)
class _Row:
    unit_xD: Tensor
    """x̂."""
    scale_x1: Tensor
    """s."""
    centred: bool

    @property
    def width(self) -> int:
        return self.unit_xD.shape[-1]

    def projected(self, u_xD: Tensor) -> Tensor:
        return u_xD - u_xD.mean(-1, keepdim=True) if self.centred else u_xD

    def jacobian(self, u_xD: Tensor) -> Tensor:
        along_x1 = (self.unit_xD * u_xD).mean(-1, keepdim=True)
        return (self.projected(u_xD) - self.unit_xD * along_x1) / self.scale_x1


def norm_product(
    x_xD: Rows,
    g_xD: Rows,
    dx_xD: Rows,
    *,
    eps: float,
    gain_D: Gain = None,
    dgain_D: Gain = None,
    centred: bool = True,
) -> NormProduct:
    """Return ∇²⟨g, norm(x)⟩·(dx, dγ) in O(D) per row; ``centred=False`` is RMSNorm.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 4.0])
        >>> norm_product(x, x, torch.ones(3), eps=0.0).x_xD.abs().max() < 1e-6
        tensor(True)
    """
    row = _row(x_xD, eps=eps, centred=centred)
    x_xD, g_xD, dx_xD = _wide(x_xD), _wide(g_xD), _wide(dx_xD)
    gg_xD = g_xD if gain_D is None else g_xD * _wide(gain_D)
    moved_xD = row.jacobian(dx_xD)
    h_xD = _curved(row, gg_xD, dx_xD, moved_xD)
    if dgain_D is not None:
        h_xD = h_xD + row.jacobian(g_xD * _wide(dgain_D))
    return NormProduct(h_xD, (g_xD * moved_xD).reshape(-1, row.width).sum(0))


def _curved(row: _Row, gg_xD: Tensor, dx_xD: Tensor, moved_xD: Tensor) -> Tensor:
    r_xD, unit_xD = row.jacobian(gg_xD), row.unit_xD
    q_x1 = (gg_xD * unit_xD).sum(-1, keepdim=True)
    rd_x1 = (r_xD * dx_xD).sum(-1, keepdim=True)
    ud_x1 = (unit_xD * dx_xD).sum(-1, keepdim=True)
    bent_xD = unit_xD * rd_x1 + r_xD * ud_x1 + q_x1 * moved_xD
    return -bent_xD / (row.width * row.scale_x1)


def norm_hessian(
    x_xD: Rows, g_xD: Rows, *, eps: float, gain_D: Gain = None, centred: bool = True
) -> NormHessian:
    """Return the blocks (x, x) and (x, γ) of ∇²⟨g, norm(x)⟩, one per row."""
    row = _row(x_xD, eps=eps, centred=centred)
    g_xD = _wide(g_xD)
    gg_xD = g_xD if gain_D is None else g_xD * _wide(gain_D)
    eye_DE = torch.eye(row.width, dtype=g_xD.dtype, device=g_xD.device)
    c_DE = eye_DE - 1 / row.width if centred else eye_DE
    u_xD, s_x11 = row.unit_xD, row.scale_x1[..., None]
    j_xDE = (c_DE - u_xD[..., :, None] * u_xD[..., None, :] / row.width) / s_x11
    r_xD = row.jacobian(gg_xD)
    q_x11 = (gg_xD * u_xD).sum(-1)[..., None, None]
    ur_xDE = u_xD[..., :, None] * r_xD[..., None, :]
    h_xDE = -(ur_xDE + ur_xDE.mT + q_x11 * j_xDE) / (row.width * s_x11)
    return NormHessian(h_xDE, j_xDE * g_xD[..., None, :])


def norm_curvature(
    x_xD: Rows, g_xD: Rows, *, eps: float, gain_D: Gain = None, centred: bool = True
) -> Float[Tensor, "*x"]:
    """Return ‖∇²ₓ⟨g, norm(x)⟩‖₂ of each row, exactly, in O(D).

    On span(x̂, Cĝ) the matrix is two by two, elsewhere it is −q/(D·s²) or zero. With
    ρ = σ²/s² and g' the part of Cĝ across x̂, the norm is that of
    [[3q(1−ρ), ‖x̂‖‖g'‖], [‖x̂‖‖g'‖, q]]/(D·s²): its lower corner covers the rest.
    """
    row = _row(x_xD, eps=eps, centred=centred)
    gg_xD = _wide(g_xD) if gain_D is None else _wide(g_xD) * _wide(gain_D)
    q_x = (gg_xD * row.unit_xD).sum(-1)
    rho_x = row.unit_xD.square().mean(-1)
    along_x, across_x = 3 * q_x * (1 - rho_x), _across(row, gg_xD)
    if row.width - centred == 1:
        return along_x.abs() / (row.width * row.scale_x1[..., 0].square())
    middle_x = (along_x + q_x) / 2
    spread_x = torch.hypot((along_x - q_x) / 2, across_x)
    return (middle_x.abs() + spread_x) / (row.width * row.scale_x1[..., 0].square())


def _across(row: _Row, gg_xD: Tensor) -> Tensor:
    """Return ‖x̂‖·‖g'‖, zero where x̂ is."""
    size_x1 = _length(row.unit_xD)
    one = torch.ones_like(size_x1)
    e_xD = row.unit_xD / torch.where(size_x1 == 0, one, size_x1)
    c_xD = row.projected(gg_xD)
    across_xD = c_xD - e_xD * (c_xD * e_xD).sum(-1, keepdim=True)
    return size_x1[..., 0] * _length(across_xD)[..., 0]


def norm_curvature_unfolded(
    x_xD: Float[Tensor, "*x D"], *, eps: float, centred: bool = True
) -> Float[Tensor, "*x"]:
    """Return ‖∂²x̂/∂x²‖ of each row as a D² × D matrix, exactly (γ = 1).

    √ρ·√max(D − 2 + 9(1−ρ)², 2)/(√D·s²) for LayerNorm, with D − 1 for D − 2 in RMSNorm;
    the second entry needs a direction across x̂ to exist.
    """
    row = _row(x_xD, eps=eps, centred=centred)
    rho_x, free = row.unit_xD.square().mean(-1), row.width - centred
    own_x = free - 1 + 9 * (1 - rho_x).square()
    widest_x = own_x.clamp_min(2.0) if free > 1 else own_x
    return (rho_x * widest_x / row.width).sqrt() / row.scale_x1[..., 0].square()


def norm_curvature_bound(
    x_xD: Rows, g_xD: Rows, *, eps: float, gain_D: Gain = None, centred: bool = True
) -> Float[Tensor, "*x"]:
    """Return (2/√(3D))·‖C(γ∘g)‖/s²: at least the curvature of each row, for every ε."""
    row = _row(x_xD, eps=eps, centred=centred)
    gg_xD = _wide(g_xD) if gain_D is None else _wide(g_xD) * _wide(gain_D)
    size_x1 = _length(row.projected(gg_xD))
    tightest = 2 / math.sqrt(3 * row.width)
    return tightest * (size_x1 / row.scale_x1.square())[..., 0]


def _row(x_xD: Tensor, *, eps: float, centred: bool) -> _Row:
    if eps < 0:
        raise InputError(f"eps {eps} is negative")
    x_xD = _wide(x_xD)
    m_xD = x_xD - x_xD.mean(-1, keepdim=True) if centred else x_xD
    scale_x1 = (m_xD.square().mean(-1, keepdim=True) + eps).sqrt()
    return _Row(m_xD / scale_x1, scale_x1, centred)


def _length(u_xD: Tensor) -> Tensor:
    length_x1: Tensor = torch.linalg.vector_norm(u_xD, dim=-1, keepdim=True)
    return length_x1


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
