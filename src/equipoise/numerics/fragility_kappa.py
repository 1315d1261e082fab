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
from equipoise.numerics.softmax import softmax_jacobian_norm


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
