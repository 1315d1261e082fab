"""Maps linear in each of two inputs: the product crosses the tangents over.

Axes, in this file:  x any leading axes · I input channel · O output channel.
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class LinearProduct(NamedTuple):
    """The part at x and the part at W; a bias has none."""

    x_xI: Tensor
    weight_OI: Tensor


def linear_product(
    g_xO: Float[Tensor, "*x O"],
    *,
    dx_xI: Float[Tensor, "*x I"],
    dweight_OI: Float[Tensor, "O I"],
) -> LinearProduct:
    """Return ∇²⟨g, xWᵀ + b⟩·(dx, dW) = (g·dW, gᵀ·dx).

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1)
        >>> linear_product(one, dx_xI=2 * one, dweight_OI=3 * one).weight_OI
        tensor([[2.]])
    """
    g_NO, dx_NI = g_xO.flatten(0, -2), dx_xI.flatten(0, -2)
    return LinearProduct(g_xO @ dweight_OI, g_NO.mT @ dx_NI)
