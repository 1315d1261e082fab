"""Block-∞/RMS geometry, and what LayerNorm and RMSNorm do to small changes.

Axes, in this file:  L token · D channel · x any leading axes.

LN(x) = γ ⊙ c/σ + β with c = x − mean(x) and σ = √(mean(c²) + ε); RMSNorm has c = x. For
γ = 1 the Jacobian is symmetric, with eigenvalues

    0 (the mean direction; LayerNorm only),   ε/σ³ (along c),   1/σ (all others).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError

# Devices that compute in float64; others (mps) scale instead.
_HAS_DOUBLES = ("cpu", "cuda")


class Gain(NamedTuple):
    """Bounds on ‖J(x)‖₂ of a normaliser at x; equal when its weight is constant."""

    lower: Tensor
    upper: Tensor


class Eigenvalues(NamedTuple):
    """The distinct eigenvalues of a normaliser's Jacobian at x, for γ = 1."""

    mean: Tensor
    """Along the all-ones direction: 0. RMSNorm has no such direction, and gives NaN."""
    along: Tensor
    """Along the centred x: ε/σ³."""
    across: Tensor
    """In every other direction: 1/σ."""


def rms(x_xD: Float[Tensor, "*x D"]) -> Float[Tensor, "*x"]:
    """Return ‖x‖₂/√D of every token, in at least float32.

    Neither end of the format is lost: the square of 1e20 is not a float32, so float32
    is summed in float64 in one visit, and float64 is scaled by its largest entry.

    >>> rms(torch.tensor([3.0, -3.0, 3.0]))
    tensor(3.)
    """
    x_xD = _wide(x_xD)
    if x_xD.dtype == torch.float32 and x_xD.device.type in _HAS_DOUBLES:
        norm_x: Tensor = torch.linalg.vector_norm(x_xD, dim=-1, dtype=torch.float64)
        return (norm_x / math.sqrt(x_xD.shape[-1])).to(torch.float32)
    largest_x1 = x_xD.abs().amax(-1, keepdim=True)
    unit_x1 = torch.where(largest_x1 == 0, 1.0, largest_x1)
    return (unit_x1 * (x_xD / unit_x1).square().mean(-1, keepdim=True).sqrt())[..., 0]


def block_norm(x_xLD: Float[Tensor, "*x L D"]) -> Float[Tensor, "*x"]:
    """Return ‖X‖_{∞,rms} = maxᵢ ‖xᵢ‖₂/√D, the largest token.

    Mixing tokens by a row-stochastic matrix never increases it.

    >>> block_norm(torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    tensor(2.)
    """
    return rms(x_xLD).amax(-1)


def layer_norm_scale(x_xD: Float[Tensor, "*x D"], *, eps: float) -> Float[Tensor, "*x"]:
    """Return σ = √(var(x) + ε), by which LayerNorm divides.

    >>> layer_norm_scale(torch.tensor([5.0, 7.0]), eps=0.0)
    tensor(1.)
    """
    x_xD = _wide(x_xD)
    return _scale(x_xD - x_xD.mean(-1, keepdim=True), eps)


def rms_norm_scale(x_xD: Float[Tensor, "*x D"], *, eps: float) -> Float[Tensor, "*x"]:
    """Return √(mean(x²) + ε), by which RMSNorm divides.

    >>> rms_norm_scale(torch.tensor([2.0, 2.0]), eps=0.0)
    tensor(2.)
    """
    return _scale(_wide(x_xD), eps)


def layer_norm_gain(
    x_xD: Float[Tensor, "*x D"],
    weight_D: Float[Tensor, "D"] | None = None,
    *,
    eps: float,
) -> Gain:
    """Return bounds on ‖J_LN(x)‖₂: |γ|₍₃₎/σ ≤ ‖J‖ ≤ |γ|₍₁₎/σ.

    The lower one: the Jacobian is 1/σ times γ on all but two directions, and any two
    directions leave a vector in the span of the three largest channels. With fewer
    than three channels only the direction of c is left, and the gain is ε/σ³·|γ|.

    >>> x = torch.tensor([1.0, 2.0, 3.0, 6.0])
    >>> layer_norm_gain(x, eps=0.5).upper
    tensor(0.5000)
    """
    sigma_x = layer_norm_scale(x_xD, eps=eps)
    return _gain(sigma_x, _weights(x_xD, weight_D), eps=eps, lost=2)


def rms_norm_gain(
    x_xD: Float[Tensor, "*x D"],
    weight_D: Float[Tensor, "D"] | None = None,
    *,
    eps: float,
) -> Gain:
    """Return bounds on ‖J_RMSNorm(x)‖₂: |γ|₍₂₎/σ ≤ ‖J‖ ≤ |γ|₍₁₎/σ.

    >>> rms_norm_gain(torch.tensor([2.0, 2.0]), eps=0.0).upper
    tensor(0.5000)
    """
    sigma_x = rms_norm_scale(x_xD, eps=eps)
    return _gain(sigma_x, _weights(x_xD, weight_D), eps=eps, lost=1)


def layer_norm_eigenvalues(x_xD: Float[Tensor, "*x D"], *, eps: float) -> Eigenvalues:
    """Return 0, ε/σ³ and 1/σ.

    >>> found = layer_norm_eigenvalues(torch.tensor([1.0, 2.0, 3.0]), eps=1 / 3)
    >>> round(float(found.across), 4)
    1.0
    """
    sigma_x = layer_norm_scale(x_xD, eps=eps)
    return Eigenvalues(0 * sigma_x, _along(sigma_x, eps), 1 / sigma_x)


def rms_norm_eigenvalues(x_xD: Float[Tensor, "*x D"], *, eps: float) -> Eigenvalues:
    """Return ε/σ³ along x and 1/σ across it.

    >>> rms_norm_eigenvalues(torch.tensor([0.0, 0.0]), eps=0.25).along
    tensor(2.)
    """
    sigma_x = rms_norm_scale(x_xD, eps=eps)
    return Eigenvalues(sigma_x * math.nan, _along(sigma_x, eps), 1 / sigma_x)


def norm_lipschitz(weight_D: Float[Tensor, "D"], *, eps: float) -> Tensor:
    """Return the global constant ‖γ‖_∞/√ε of LayerNorm and RMSNorm (Emadi, App. A).

    Attained at 0 by RMSNorm and, for constant γ, at tokens without variance by
    LayerNorm; of little use all the same: 316·‖γ‖_∞ at ε = 1e-5.

    >>> norm_lipschitz(torch.ones(4), eps=0.25)
    tensor(2.)
    """
    return _wide(weight_D).abs().amax() / math.sqrt(_positive(eps))


def magnitude_reset(
    weight_D: Float[Tensor, "D"], bias_D: Float[Tensor, "D"] | None = None
) -> Tensor:
    """Return ‖γ‖_∞ + ‖β‖_∞, which bounds ‖LN(x)‖_rms for every x (Emadi, App. A).

    >>> magnitude_reset(torch.ones(2), torch.tensor([0.0, -0.5]))
    tensor(1.5000)
    """
    reset = _wide(weight_D).abs().amax()
    return reset if bias_D is None else reset + _wide(bias_D).abs().amax()


def magnitude_reset_rms(
    weight_D: Float[Tensor, "D"], bias_D: Float[Tensor, "D"] | None = None
) -> Tensor:
    """Return ‖γ‖_∞ + ‖β‖_rms: ours, never above ``magnitude_reset``.

    >>> magnitude_reset_rms(torch.ones(4), torch.tensor([0.0, 0.0, 0.0, 2.0]))
    tensor(2.)
    """
    reset = _wide(weight_D).abs().amax()
    return reset if bias_D is None else reset + rms(bias_D)


def _wide(x: Tensor) -> Tensor:
    if not x.dtype.is_floating_point or 0 in x.shape[-1:] or x.ndim == 0:
        raise InputError(
            f"norms take real floats over a last axis with entries, got {x.dtype} "
            f"of shape {tuple(x.shape)}"
        )
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _positive(eps: float) -> float:
    if not eps > 0:
        raise InputError(f"eps {eps}: the global constant needs a positive one")
    return eps


def _scale(c_xD: Tensor, eps: float) -> Tensor:
    if not eps >= 0:
        raise InputError(f"eps {eps}: a normaliser's floor is not negative")
    return torch.hypot(rms(c_xD), c_xD.new_full((), math.sqrt(eps)))


def _along(sigma_x: Tensor, eps: float) -> Tensor:
    # (√ε/σ)²/σ and not ε/σ³: σ³ leaves float32 long before σ does.
    return (math.sqrt(eps) / sigma_x).square() / sigma_x


def _weights(x_xD: Tensor, weight_D: Tensor | None) -> Tensor:
    if weight_D is None:
        return _wide(x_xD).new_ones(x_xD.shape[-1])
    if weight_D.shape != x_xD.shape[-1:]:
        raise InputError(
            f"weight has shape {tuple(weight_D.shape)}, tokens have {x_xD.shape[-1]} "
            "channels"
        )
    return _wide(weight_D)


def _gain(sigma_x: Tensor, weight_D: Tensor, *, eps: float, lost: int) -> Gain:
    largest_D = weight_D.abs().sort(descending=True).values
    if largest_D.shape[0] <= lost:
        return _narrow_gain(sigma_x, weight_D, eps=eps, lost=lost)
    return Gain(largest_D[lost] / sigma_x, largest_D[0] / sigma_x)


def _narrow_gain(sigma_x: Tensor, weight_D: Tensor, *, eps: float, lost: int) -> Gain:
    """Return the gain when c is the only direction that is not lost."""
    if weight_D.shape[0] < lost:
        return Gain(0 * sigma_x, 0 * sigma_x)
    exact_x = _along(sigma_x, eps) * rms(weight_D)
    return Gain(exact_x, exact_x)
