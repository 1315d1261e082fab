"""How much of a tensor falls outside what a format can hold.

Axes, in this file: x any.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeUse:
    """Shares of the finite, non-zero entries of a tensor, each in [0, 1]."""

    overflow: float
    """Beyond the largest number: infinite, or clipped where the format saturates."""
    subnormal: float
    """Below the normal range, zero excluded: relative accuracy is being lost."""
    flushed: float
    """At most half the smallest subnormal: rounded to 0."""


def range_use(x: Float[Tensor, "*x"], format: Format) -> RangeUse:
    """Return which shares of x overflow, go subnormal, or vanish in a format.

    A tensor with no finite non-zero entry uses no range: NaN, not 0.

    Example:
        >>> import torch
        >>> from equipoise.numerics.formats import FORMATS
        >>> x = torch.tensor([1.0, 1e5, 1e-5, 1e-9])
        >>> range_use(x, FORMATS["fp16"])
        RangeUse(overflow=0.25, subnormal=0.5, flushed=0.25)
    """
    size = x.detach().abs()
    size = size[size.isfinite() & (size > 0)]
    # Half a step past the largest still rounds back to it.
    edge = format.largest * (1 + format.unit_roundoff / (2 - format.spacing))
    beyond = size > format.largest if format.finite_only else size >= edge
    return RangeUse(
        overflow=beyond.double().mean().item(),
        subnormal=(size < format.smallest_normal).double().mean().item(),
        flushed=(size <= format.smallest_subnormal / 2).double().mean().item(),
    )
