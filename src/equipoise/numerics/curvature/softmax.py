"""Softmax: its contracted second derivative is a third central moment.

Axes, in this file:  x any leading axes · K, L key.

For a = softmax(t), a cotangent e and p = (diag a − aaᵀ)e,

    ∇²ₜ⟨e, a⟩ = diag(p) − apᵀ − paᵀ,    uᵀ∇²v = E_a[(e−ē)(u−ū)(v−v̄)],

so −ρJ ≼ ∇² ≼ ρJ with ρ = max_j |e_j − ē| over the keys that are seen.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.softmax import softmax_jacobian_norm

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
