"""The curvature of softmax, of the two losses built on it or on squares, of products.

Axes, in this file:  x any leading axes · K, L key · V, W class · I input channel ·
O output channel.

For a = softmax(t), a cotangent e and p = (diag a − aaᵀ)e,

    ∇²ₜ⟨e, a⟩ = diag(p) − apᵀ − paᵀ,    uᵀ∇²v = E_a[(e−ē)(u−ū)(v−v̄)],

a third central moment, so −ρJ ≼ ∇² ≼ ρJ with ρ = max_j |e_j − ē| over the keys that are
seen. Cross-entropy and squared error have their Hessians in the output of the network;
a map linear in each of two inputs crosses their tangents over.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.theory.softmax_norms import softmax_jacobian_norm

# Of ∂²a/∂t² unfolded to K² × K, over all K: two keys at (3 ∓ √3)/6.
UNFOLDED_SUPREMUM = (2 / 27) ** 0.5


def softmax_gradient(
    a_xK: Float[Tensor, "*x K"], e_xK: Float[Tensor, "*x K"]
) -> Float[Tensor, "*x K"]:
    """Return p = (diag a − aaᵀ)e, the cotangent of the scores."""
    return a_xK * (e_xK - (a_xK * e_xK).sum(-1, keepdim=True))


def softmax_product(
    a_xK: Float[Tensor, "*x K"],
    e_xK: Float[Tensor, "*x K"],
    dt_xK: Float[Tensor, "*x K"],
) -> Float[Tensor, "*x K"]:
    """Return ∇²ₜ⟨e, softmax(t)⟩·dt, given the rows a = softmax(t).

    Example:
        >>> a = torch.tensor([0.5, 0.5])
        >>> softmax_product(a, torch.tensor([1.0, 0.0]), torch.ones(2)).abs()
        tensor([0., 0.])
    """
    p_xK = softmax_gradient(a_xK, e_xK)
    along_p = (p_xK * dt_xK).sum(-1, keepdim=True)
    along_a = (a_xK * dt_xK).sum(-1, keepdim=True)
    return p_xK * (dt_xK - along_a) - a_xK * along_p


def softmax_hessian(
    a_xK: Float[Tensor, "*x K"], e_xK: Float[Tensor, "*x K"]
) -> Float[Tensor, "*x K L"]:
    """Return diag(p) − apᵀ − paᵀ."""
    p_xK = softmax_gradient(a_xK, e_xK)
    ap_xKL = a_xK[..., :, None] * p_xK[..., None, :]
    return torch.diag_embed(p_xK) - ap_xKL - ap_xKL.mT


def softmax_curvature_bound(
    a_xK: Float[Tensor, "*x K"], e_xK: Float[Tensor, "*x K"]
) -> Float[Tensor, "*x"]:
    """Return ρ‖J‖₂ ≥ ‖∇²ₜ⟨e, softmax⟩‖₂, ρ over the keys with a > 0."""
    off_xK = (e_xK - (a_xK * e_xK).sum(-1, keepdim=True)).abs()
    off_xK = off_xK.masked_fill(a_xK == 0, 0.0)
    return off_xK.amax(-1) * softmax_jacobian_norm(a_xK)


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


def squared_error_product(
    dz_xV: Float[Tensor, "*x V"], *, entries: int
) -> Float[Tensor, "*x V"]:
    """Return (2/entries)·dz, the Hessian of ‖z − target‖²/entries times dz."""
    return 2 / entries * dz_xV


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
