"""What low precision does to LayerNorm and RMSNorm, token by token.

Axes, in this file: x tokens · D model width.

z = (x - μ)/√(v+ε). Three separate questions, which one number in print (ρ_LN) mixes:

    κ_LN = ‖x‖/(√D σ) ≥ 1       how much cancelling the mean amplifies input rounding;
                                it does not depend on ε
    r_ε  = ε/(v+ε) ∈ (0, 1)     whether ε, not the token, sets the scale
    ρ̃_LN = (1-r_ε)·D·u_stat     relative error of the statistics themselves, u_stat
                                being the precision they are summed in.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.formats import Format
from equipoise.numerics.rounding import rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class NormCondition:
    """One value per token."""

    cancellation: Float[Tensor, "*x"]
    """κ_LN; 1 for RMSNorm; infinite for a constant token."""
    epsilon_share: Float[Tensor, "*x"]
    """r_ε."""
    statistics_error: Float[Tensor, "*x"]
    """ρ̃_LN."""


def norm_condition(
    x_xD: Float[Tensor, "*x D"],
    *,
    eps: float,
    statistics: Format,
    centred: bool = True,
) -> NormCondition:
    """Return κ_LN, r_ε and ρ̃_LN of every token.

    Args:
        x_xD: what enters the norm.
        eps: the norm's ε.
        statistics: the format its sums are accumulated in; fp32 in stock kernels.
        centred: LayerNorm; False for RMSNorm, which has no mean to cancel.

    Example:
        >>> from equipoise.numerics.formats import FORMATS
        >>> x = torch.tensor([[1.0, -1.0], [101.0, 99.0]])
        >>> norm_condition(x, eps=1.0, statistics=FORMATS["fp32"]).cancellation
        tensor([  1.0000, 100.0050])
    """
    x_xD = x_xD.to(torch.promote_types(x_xD.dtype, torch.float32))
    D = x_xD.shape[-1]
    power_x = x_xD.square().mean(-1)
    v_x = x_xD.var(-1, correction=0) if centred else power_x
    return NormCondition(
        cancellation=(power_x / v_x).sqrt().where(v_x.isnan() | (v_x > 0), torch.inf),
        epsilon_share=eps / (v_x + eps),
        statistics_error=v_x / (v_x + eps) * D * statistics.unit_roundoff,
    )


def epsilon_stored(eps: float, format: Format) -> float:
    """Return what is left of ε in a format: 1e-8 is 0 in fp16, 1e-5 is subnormal.

    Example:
        >>> from equipoise.numerics.formats import FORMATS
        >>> epsilon_stored(1e-8, FORMATS["fp16"])
        0.0
    """
    wide = torch.tensor([eps], dtype=torch.float64)
    return float(rounded(wide, format).item())
