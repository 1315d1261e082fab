"""Cross-entropy and squared error: Hessians in the output of the network.

Axes, in this file:  x row (token or example) · V, W class.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.softmax import softmax_jacobian_norm


def cross_entropy_product(
    z_xV: Float[Tensor, "*x V"], dz_xV: Float[Tensor, "*x V"], *, weight_x: Tensor
) -> Float[Tensor, "*x V"]:
    """Return w·(diag a − aaᵀ)·dz with a = softmax(z): the target plays no part.

    ``weight_x`` is how much each row counts: 1/N for a mean over N rows, 0 for an
    ignored one. Label smoothing changes the gradient and not this matrix.

    Example:
        >>> z, dz = torch.zeros(1, 2), torch.tensor([[1.0, -1.0]])
        >>> cross_entropy_product(z, dz, weight_x=torch.ones(1))
        tensor([[ 0.5000, -0.5000]])
    """
    a_xV = z_xV.softmax(-1)
    centred_xV = dz_xV - (a_xV * dz_xV).sum(-1, keepdim=True)
    return weight_x[..., None] * a_xV * centred_xV


def cross_entropy_hessian(
    z_xV: Float[Tensor, "*x V"], *, weight_x: Tensor
) -> Float[Tensor, "*x V W"]:
    """Return w·(diag a − aaᵀ), one block per row: rows do not mix."""
    a_xV = z_xV.softmax(-1)
    j_xVW = torch.diag_embed(a_xV) - a_xV[..., :, None] * a_xV[..., None, :]
    return weight_x[..., None, None] * j_xVW


def cross_entropy_curvature(
    z_xV: Float[Tensor, "*x V"], *, weight_x: Tensor
) -> Float[Tensor, "*x"]:
    """Return w·‖diag a − aaᵀ‖₂ of each row, exactly; at most w/2."""
    return weight_x * softmax_jacobian_norm(z_xV.softmax(-1))


def squared_error_product(
    dz_xV: Float[Tensor, "*x V"], *, entries: int
) -> Float[Tensor, "*x V"]:
    """Return (2/entries)·dz, the Hessian of ‖z − target‖²/entries times dz."""
    return 2 / entries * dz_xV


def squared_error_curvature(*, entries: int) -> float:
    """Return 2/entries: the Hessian is this times the identity."""
    return 2 / entries
