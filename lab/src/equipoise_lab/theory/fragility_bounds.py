"""Bounds on the low-precision error of an attention head: fragility, certified or not.

Axes, in this file: x batch and heads · Q query · K key · d head width · D model width.

``head_bound`` cannot be exceeded. Storage is narrow and sums are exact (accumulating in
fp32 or wider changes nothing that matters). Rounding moves a number x by at most
u|x| + h, with h half the smallest subnormal, so tensor by tensor, with nothing dropped:

    |Δq| ≤ u|q|+h,   |Δk| ≤ u|k|+h
    ‖Δsᵢ‖ ≤ c(‖Δqᵢ‖‖K‖₂ + ‖q̂ᵢ‖‖ΔK‖₂) + rounding of ŝᵢ
    ‖Δpᵢ‖ ≤ Λᵢ‖Δsᵢ‖ + rounding of p̂ᵢ,     ‖Δaᵢ‖ ≤ ‖Δpᵢ‖‖V‖₂ + ‖p̂ᵢ|ΔV|‖ + …

Λᵢ bounds ‖diag(p)-ppᵀ‖₂ along the whole segment from s to ŝ: with δ = 2·max|Δs|,
Λ = min(½, e^δ p₍₁₎, 2e^δ(1-p₍₁₎)), since no probability moves by more than e^±δ.

``conditions`` gives condition numbers, exact and over all rows. Each is an
amplification ≥ (or about) 1 without units, unlike the sums in print: with S = c·QKᵀ,
P = softmax(S), A = PV, O = AW and J(p) = diag(p) - ppᵀ,

    κ_score   = c‖Q‖‖K‖/‖S‖               κ_softmax = max‖J(pᵢ)‖₂ ‖S‖/‖P‖
    κ_val     = ‖P‖‖V‖₂/‖A‖               κ′_val    = ‖|P||V|‖/‖A‖
    κ_proj    = ‖A‖‖W‖₂/‖O‖               κ′_proj   = ‖|A||W|‖/‖O‖

in Frobenius norms unless marked, and to first order in the unit roundoff u

    ‖ΔO‖/‖O‖ ≤ u{κ_proj[κ_val(κ_softmax(1+2κ_score)+1) + κ′_val+1] + κ′_proj + 1}.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.formats import Format
from equipoise.theory.softmax_norms import softmax_jacobian_norm

QKV = tuple[Float[Tensor, "*x Q d"], Float[Tensor, "*x K d"], Float[Tensor, "*x K d"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBound:
    """‖ΔO‖_F ≤ ``relative``·‖O‖_F for each head, certified."""

    relative: Float[Tensor, "*x"]
    """Infinite when the head writes nothing or a stored number may overflow."""
    in_range: Tensor
    """Whether no stored tensor can leave the format's range."""


def head_bound(
    qkv: QKV,
    w_xdD: Float[Tensor, "*x d D"],
    *,
    format: Format,
    visible_QK: Tensor | None = None,
) -> HeadBound:
    """Return a certified bound on the relative error of softmax(c·QKᵀ)V·W.

    Certified for round-to-nearest storage of q, k, v, W, scores, probabilities, PV and
    the result, with exact accumulation. Give float64: the bound itself is evaluated in
    the inputs' precision, and a factor 1 + 10⁻⁹ covers that in float64 only.
    """
    q_xQd, k_xKd, v_xKd = qkv
    if any(x.dtype != torch.float64 for x in (*qkv, w_xdD)):
        raise InputError("head_bound is certified in float64 only: widen the tensors")
    grid = _Grid(format)
    c, s_xQK, seen_QK, p_xQK, a_xQd, o_xQD = _forward(qkv, w_xdD, visible_QK)

    ds_xQK = _score_shift(q_xQd, k_xKd, s_xQK, grid, c) * seen_QK
    dp_xQ, size_p_xQK = _prob_shift(p_xQK, ds_xQK, grid)
    da_xQ, size_a_xQd = _product_shift(a_xQd, (size_p_xQK, v_xKd), dp_xQ, grid)
    do_xQ, size_o_xQD = _product_shift(o_xQD, (size_a_xQd, w_xdD), da_xQ, grid)

    sizes = (q_xQd, k_xKd, v_xKd, w_xdD, (s_xQK.abs() + ds_xQK) * seen_QK, size_o_xQD)
    top = torch.stack([x.abs().amax((-2, -1)) for x in sizes]).amax(0)
    top = torch.maximum(top, size_a_xQd.amax((-2, -1)))
    in_range = top * (1 + format.unit_roundoff) < format.largest
    bound = do_xQ.norm(dim=-1) / o_xQD.norm(dim=(-2, -1)) * (1 + 1e-9)
    return HeadBound(
        relative=torch.where(in_range | top.isnan(), bound, math.inf), in_range=in_range
    )


class _Forward(NamedTuple):
    """One head as it computes: scale, scores, visible keys, P, PV and PVW."""

    c: float
    s_xQK: Tensor
    seen_QK: Tensor
    p_xQK: Tensor
    a_xQd: Tensor
    o_xQD: Tensor


def _forward(qkv: QKV, w_xdD: Tensor, visible_QK: Tensor | None) -> _Forward:
    q_xQd, k_xKd, v_xKd = qkv
    c = float(q_xQd.shape[-1]) ** -0.5
    s_xQK = c * (q_xQd @ k_xKd.mT)
    everywhere = torch.ones_like(s_xQK, dtype=torch.bool)
    seen_QK = everywhere if visible_QK is None else visible_QK.expand_as(s_xQK)
    p_xQK = s_xQK.masked_fill(~seen_QK, -math.inf).softmax(-1)
    a_xQd = p_xQK @ v_xKd
    return _Forward(c, s_xQK, seen_QK, p_xQK, a_xQd, a_xQd @ w_xdD)


@dataclass(frozen=True, slots=True)
class _Grid:
    format: Format

    def shift(self, size: Tensor) -> Tensor:
        """Return the largest move of a number of this magnitude when rounded."""
        h = self.format.smallest_subnormal / 2
        return self.format.unit_roundoff * size.abs() + h * (size != 0)


def _score_shift(
    q_xQd: Tensor, k_xKd: Tensor, s_xQK: Tensor, grid: _Grid, c: float
) -> Tensor:
    """Return the largest |Δsᵢⱼ|, entry by entry: two absolute-value products."""
    dq, dk = grid.shift(q_xQd), grid.shift(k_xKd)
    moved = c * (dq @ k_xKd.abs().mT + (q_xQd.abs() + dq) @ dk.mT)
    # An exact zero score may become tiny: keep its subnormal step.
    h = grid.format.smallest_subnormal / 2
    return moved + grid.format.unit_roundoff * (s_xQK.abs() + moved) + h


def _prob_shift(p_xQK: Tensor, ds_xQK: Tensor, grid: _Grid) -> tuple[Tensor, Tensor]:
    """Return ‖Δpᵢ‖₂ and an upper bound on every stored probability."""
    # Past e^600 a probability may become anything; the cap keeps 0·∞ out.
    growth_xQ = (2 * ds_xQK.amax(-1)).clamp(max=600.0).exp()
    first_xQ, where_xQ = p_xQK.max(-1)
    # 1 - p₍₁₎ as a sum of the others: the difference would cancel on saturated rows.
    rest_xQ = p_xQK.scatter(-1, where_xQ[..., None], 0.0).sum(-1)
    jacobian_xQ = growth_xQ * torch.minimum(first_xQ, 2 * rest_xQ)
    moved_xQ = jacobian_xQ.clamp(max=0.5) * ds_xQK.norm(dim=-1)
    size_xQK = (p_xQK * growth_xQ[..., None]).clamp(max=1.0)
    size_xQK = torch.where(growth_xQ[..., None] > 1e200, 1.0, size_xQK)
    stored_xQK = grid.shift(size_xQK)
    return moved_xQ.clamp(max=2**0.5) + stored_xQK.norm(dim=-1), size_xQK + stored_xQK


def _product_shift(
    y_xNm: Tensor,
    factors: tuple[Tensor, Tensor],
    shift_xN: Tensor,
    grid: _Grid,
) -> tuple[Tensor, Tensor]:
    """Return ‖Δyᵢ‖₂ and a bound on |ŷ| for y = XM, both rounded, X moved by the shift.

    fl(X̂M̂) - XM = (X̂-X)M + X̂ΔM + rounding; ``factors`` is (a bound on |X̂|, M).
    """
    size_xNk, m_xkm = factors
    dm_xkm = grid.shift(m_xkm)
    moved_xN = shift_xN * torch.linalg.matrix_norm(m_xkm, ord=2)[..., None]
    from_m_xNm = size_xNk @ dm_xkm
    near_xNm = y_xNm.abs() + moved_xN[..., None] + from_m_xNm
    size_xNm = torch.minimum(size_xNk @ (m_xkm.abs() + dm_xkm), near_xNm)
    stored_xNm = grid.shift(size_xNm)
    shift = moved_xN + from_m_xNm.norm(dim=-1) + stored_xNm.norm(dim=-1)
    return shift, size_xNm + stored_xNm


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The six condition numbers of each head."""

    score: Tensor
    softmax: Tensor
    softmax_shifted: Tensor
    """κ_softmax of scores minus their row maximum: for kernels that never store S."""
    value: Tensor
    value_entries: Tensor
    projection: Tensor
    projection_entries: Tensor

    def first_order_bound(self, format: Format) -> Tensor:
        """Return the worst relative error to first order in u: not certified.

        Holds while max|Δs| ≪ 1 and nothing leaves the range; ``head_bound`` is the
        certified one.
        """
        row = self.softmax * (1 + 2 * self.score) + 1
        mixed = self.value * row + self.value_entries + 1
        whole = self.projection * mixed + self.projection_entries + 1
        return format.unit_roundoff * whole


def conditions(
    qkv: QKV,
    w_xdD: Float[Tensor, "*x d D"],
    *,
    visible_QK: Tensor | None = None,
) -> Conditions:
    """Return the condition numbers of softmax(c·QKᵀ)V·W; hidden scores count as 0."""
    q_xQd, k_xKd, v_xKd = qkv
    c, s_xQK, seen, p_xQK, a_xQd, o_xQD = _forward(qkv, w_xdD, visible_QK)
    s_xQK = s_xQK.masked_fill(~seen, 0.0)
    top_xQ1 = s_xQK.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
    gain_x = softmax_jacobian_norm(p_xQK).amax(-1)
    return Conditions(
        score=c * _size(q_xQd) * _size(k_xKd) / _size(s_xQK),
        softmax=gain_x * _size(s_xQK) / _size(p_xQK),
        softmax_shifted=gain_x * _size((s_xQK - top_xQ1) * seen) / _size(p_xQK),
        value=_size(p_xQK) * _reach(v_xKd) / _size(a_xQd),
        value_entries=_size(p_xQK @ v_xKd.abs()) / _size(a_xQd),
        projection=_size(a_xQd) * _reach(w_xdD) / _size(o_xQD),
        projection_entries=_size(a_xQd.abs() @ w_xdD.abs()) / _size(o_xQD),
    )


def _size(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(x)
    return norm


def _reach(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(x, ord=2)
    return norm
