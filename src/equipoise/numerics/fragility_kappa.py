"""Condition numbers of one attention head, exact and over all rows.

Axes, in this file: x batch and heads · Q query · K key · d head width · D model width.

Each is an amplification ≥ (or about) 1 without units, unlike the sums in print: with
S = c·QKᵀ, P = softmax(S), A = PV, O = AW and J(p) = diag(p) - ppᵀ,

    κ_score   = c‖Q‖‖K‖/‖S‖               κ_softmax = max‖J(pᵢ)‖₂ ‖S‖/‖P‖
    κ_val     = ‖P‖‖V‖₂/‖A‖               κ′_val    = ‖|P||V|‖/‖A‖
    κ_proj    = ‖A‖‖W‖₂/‖O‖               κ′_proj   = ‖|A||W|‖/‖O‖

in Frobenius norms unless marked, and to first order in the unit roundoff u

    ‖ΔO‖/‖O‖ ≤ u{κ_proj[κ_val(κ_softmax(1+2κ_score)+1) + κ′_val+1] + κ′_proj + 1}.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.formats import Format

# Halvings that take an interval of length ≤ 1 to the spacing of the dtype.
_HALVINGS = {torch.float32: 30, torch.float64: 60}


def softmax_gain(p_xK: Float[Tensor, "*x K"]) -> Float[Tensor, "*x"]:
    """Return ‖diag(p) - ppᵀ‖₂ of every row, to full relative accuracy.

    The largest eigenvalue is the root in [p₍₂₎, p₍₁₎] of

        Σ_{i≥2} p₍ᵢ₎²/(λ - p₍ᵢ₎) = (λ - p₍₁₎r)/(p₍₁₎ - λ),     r = Σ_{i≥2} p₍ᵢ₎,

    which never forms 1 - p₍₁₎ and so stays accurate on saturated rows. It is bracketed
    by max pᵢ(1-pᵢ) and twice that. NaN rows give NaN.

    Example:
        >>> softmax_gain(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
        tensor([0.5000, 0.0000])
    """
    p_xK = p_xK.to(torch.promote_types(p_xK.dtype, torch.float32))
    if p_xK.shape[-1] == 1:
        return p_xK[..., 0] * 0.0
    first_x, where_x = p_xK.max(-1)
    rest_xK = p_xK.scatter(-1, where_x[..., None], 0.0)
    r_x = rest_xK.sum(-1)
    low_x = torch.maximum(rest_xK.amax(-1), first_x * r_x)
    high_x = torch.minimum(first_x, 2 * low_x)
    for _ in range(_HALVINGS[p_xK.dtype]):
        middle_x = (low_x + high_x) / 2
        # At λ = p₍ᵢ₎ the term is infinite and the root lies above: 0/0 only for p = 0.
        gap_xK = middle_x[..., None] - rest_xK
        pull_x = torch.where(rest_xK > 0, rest_xK.square() / gap_xK, rest_xK).sum(-1)
        above_x = (first_x - middle_x) * pull_x > middle_x - first_x * r_x
        low_x = torch.where(above_x, middle_x, low_x)
        high_x = torch.where(above_x, high_x, middle_x)
    return (low_x + high_x) / 2 + p_xK.sum(-1) * 0.0


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
    qkv: tuple[
        Float[Tensor, "*x Q d"], Float[Tensor, "*x K d"], Float[Tensor, "*x K d"]
    ],
    w_xdD: Float[Tensor, "*x d D"],
    *,
    scale: float | None = None,
    visible_QK: Tensor | None = None,
) -> Conditions:
    """Return the condition numbers of softmax(c·QKᵀ)V·W; hidden scores count as 0."""
    q_xQd, k_xKd, v_xKd = qkv
    c = q_xQd.shape[-1] ** -0.5 if scale is None else scale
    s_xQK = c * (q_xQd @ k_xKd.mT)
    seen = torch.ones_like(s_xQK, dtype=torch.bool)
    seen = seen if visible_QK is None else visible_QK.expand_as(s_xQK)
    p_xQK = s_xQK.masked_fill(~seen, -torch.inf).softmax(-1)
    a_xQd = p_xQK @ v_xKd
    o_xQD = a_xQd @ w_xdD
    s_xQK = s_xQK.masked_fill(~seen, 0.0)
    top_xQ1 = s_xQK.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
    gain_x = softmax_gain(p_xQK).amax(-1)
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
