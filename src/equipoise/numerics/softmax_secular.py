"""The largest eigenvalue of diag(p) − ppᵀ, to relative accuracy.

Axes, in this file:  x any leading axes · K key.

With p₍₁₎ ≥ p₍₂₎ ≥ … and r = Σ_{i≥2} p₍ᵢ₎, λ is the one root between p₍₂₎ and p₍₁₎ of

    Σ_{i≥2} p₍ᵢ₎²/(λ − p₍ᵢ₎) = (λ − p₍₁₎r)/(p₍₁₎ − λ).

The usual form Σ pᵢ/(pᵢ − λ) = 0 has 1 − p₍₁₎ hidden in it, and reads noise on saturated
rows. Here every sum has terms of one sign and everything is in units of p₍₂₎.
"""

import torch
from torch import Tensor

from equipoise.numerics.softmax_rows import Rows

# Quadratic, from above: 4 passes reach float64 on every row tried, the rest is margin.
_PASSES = 6


def secular_root(rows: Rows) -> Tensor:
    """Return λ of every row; 0 for a one-hot row, p₍₁₎ when the two largest tie."""
    second_x = rows.second_x
    # A one-hot row has no second key: its unit is 1 and its λ is 0.
    return torch.where(second_x == 0, 0.0, second_x + _offset(rows) * _unit(rows))


def secular_vector(rows: Rows) -> Tensor:
    """Return the unit eigenvector, the largest key first; NaN for a one-hot row.

    v ∝ p/(λ − p) off the top; v ⟂ 1 gives the top, where λ − p may have cancelled.
    """
    unit_x1 = _unit(rows)[..., None]
    P_xK = rows.rest_xK / unit_x1
    v_xK = P_xK / (_positive(_offset(rows))[..., None] + (1 - P_xK))
    v_xK = torch.cat([-v_xK.sum(-1, keepdim=True), v_xK], -1)
    length_x1: Tensor = v_xK.norm(dim=-1, keepdim=True)
    return v_xK / length_x1


def _unit(rows: Rows) -> Tensor:
    return torch.where(rows.second_x == 0, 1.0, rows.second_x)


def _positive(x_x: Tensor) -> Tensor:
    return x_x.clamp(min=torch.finfo(x_x.dtype).eps ** 2)  # a tie is 0/0 otherwise


def _offset(rows: Rows) -> Tensor:
    """Return x = (λ − p₍₂₎)/p₍₂₎."""
    unit_x = _unit(rows)
    P_xK = rows.rest_xK / unit_x[..., None]
    shift_x = 1 - rows.top_x * (rows.away_x / unit_x)
    gap_x = rows.top_x - rows.second_x
    highest_x = torch.minimum(rows.top_x, 2 * rows.top_x * rows.away_x)
    x_x = (highest_x - rows.second_x) / unit_x
    for _ in range(_PASSES):
        x_x = _pass(x_x, P_xK, unit_x=unit_x, gap_x=gap_x, shift_x=shift_x)
    return x_x


def _pass(
    x_x: Tensor, P_xK: Tensor, *, unit_x: Tensor, gap_x: Tensor, shift_x: Tensor
) -> Tensor:
    """Return a better x.

    The sum is replaced by a + b/x of the same value and slope (Bunch, Nielsen and
    Sorensen, 1978), which leaves (1+a)x² + (shift + b − a·gap)x − b·gap = 0.
    """
    x_x, D_xK = _positive(x_x), 1 - P_xK
    share_xK = P_xK / (x_x[..., None] + D_xK)
    a_x = (share_xK.square() * D_xK).sum(-1)
    b_x = (share_xK * x_x[..., None]).square().sum(-1)
    half_x = (shift_x + unit_x * b_x - a_x * gap_x) / 2
    lead_x, last_x = 1 + unit_x * a_x, b_x * gap_x
    root_x = (half_x.square() + lead_x * last_x).sqrt()
    # Whichever form adds numbers of one sign.
    return torch.where(
        half_x > 0, last_x / (half_x + root_x), (root_x - half_x) / lead_x
    )
