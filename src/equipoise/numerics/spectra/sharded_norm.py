"""The spectral norm of a matrix whose rows lie in several places, by one sum a time.

Axes, in this file:  M rows of one place · D the width they share · K direction.

With A₁, A₂, … stacked, AᵀA = Σ AᵣᵀAᵣ. All ranks know the same K directions V, each
rank adds AᵣᵀAᵣV, and the sum Y = AᵀAV is all that is known after one exchange:

    ‖Y‖₂ ≤ ‖A‖₂²,  and  ‖Yu − λVu‖  of the largest Ritz pair (λ, u) says how well.

The next directions are the Ritz vector, its residual, where it came from (a locally
optimal gradient step: Knyazev, 2001), and the images of the other Ritz vectors. So a
norm is followed over training; a narrow matrix is known exactly at once.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.spectra.estimate import Search
from equipoise.numerics.spectra.extremes import top_eigenvalues
from equipoise.numerics.spectra.lanczos import gram_product

NUMBERS = 8192
"""To exchange for one matrix: all directions of a narrow one, some of a wide one."""
FEWEST = 4
# Two places that do not share their directions add up to no symmetric matrix.
_ASYMMETRY = 1e-3


class SharedNorm(NamedTuple):
    """What one exchange yields."""

    value: float
    """‖A‖₂ from below; NaN where a share is, or where the shares do not fit."""
    error: float
    """A singular value lies within this part of the value; 0 where it is exact."""
    basis_DK: Tensor
    """The directions of the next exchange."""


def first_basis(width: int) -> Float[Tensor, "D K"]:
    """Return the directions of a first exchange: all, or some random ones.

    Example:
        >>> first_basis(64).shape, first_basis(512).shape, first_basis(4096).shape
        (torch.Size([64, 64]), torch.Size([512, 16]), torch.Size([4096, 4]))
    """
    if width**2 <= NUMBERS:
        return torch.eye(width, dtype=torch.float64)
    rng = torch.Generator().manual_seed(0)
    count = max(FEWEST, NUMBERS // width)
    drawn_DK = torch.randn(width, count, generator=rng, dtype=torch.float64)
    return _orthonormal(drawn_DK)


@torch.no_grad()
def leading_basis(matrix_MD: Float[Tensor, "M D"]) -> Float[Tensor, "D K"]:
    """Return the first directions with a few leading right singular vectors ahead.

    Of a matrix that is whole for once; later exchanges have only shares of it.
    """
    wide_MD = matrix_MD.to(torch.promote_types(matrix_MD.dtype, torch.float32))
    start_DK = first_basis(matrix_MD.shape[1])
    if start_DK.shape[0] == start_DK.shape[1]:
        return start_DK
    found = top_eigenvalues(
        lambda x_D: gram_product(wide_MD, x_D),
        start_DK[:, 0].to(wide_MD),
        count=FEWEST,
        search=Search(tolerance=1e-3, at_most=96),
    )
    vectors = [e.vector.double().cpu() for e in found if e.vector is not None]
    several_DK = torch.column_stack((*vectors, start_DK))
    return _orthonormal(several_DK)[:, : start_DK.shape[1]]


@torch.no_grad()
def share_of_image(
    shard_MD: Float[Tensor, "M D"], basis_DK: Float[Tensor, "D K"]
) -> Float[Tensor, "D K"]:
    """Return AᵣᵀAᵣV of one place; all places' add up. No rows add nothing.

    Example:
        >>> share_of_image(torch.tensor([[2.0, 0.0]]), torch.eye(2))
        tensor([[4., 0.],
                [0., 0.]])
    """
    wide_MD = shard_MD.to(torch.promote_types(shard_MD.dtype, torch.float32))
    return wide_MD.mT @ (wide_MD @ basis_DK.to(wide_MD))


def shared_norm(
    basis_DK: Float[Tensor, "D K"], shares: Sequence[Float[Tensor, "D K"]]
) -> SharedNorm:
    """Return ‖A‖₂ from all places' shares of AᵀAV, and the directions to ask for next.

    Shares that were made with different directions give NaN, and a fresh start.

    Example:
        >>> basis = first_basis(2)
        >>> shards = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
        >>> whole = shared_norm(basis, [share_of_image(a, basis) for a in shards])
        >>> round(whole.value, 4)
        4.0
    """
    if any(share.shape != basis_DK.shape for share in shares) or not shares:
        raise InputError(
            f"shares of shape {[tuple(s.shape) for s in shares]} do not fit directions "
            f"of shape {tuple(basis_DK.shape)}"
        )
    image_DK = torch.stack([share.double().cpu() for share in shares]).sum(0)
    small_KK = basis_DK.mT @ image_DK
    apart = (small_KK - small_KK.mT).norm()
    if not apart <= _ASYMMETRY * small_KK.norm():  # NaN is not small either
        return SharedNorm(math.nan, math.nan, first_basis(len(basis_DK)))
    value = float(torch.linalg.matrix_norm(image_DK, 2)) ** 0.5
    if basis_DK.shape[0] == basis_DK.shape[1]:
        return SharedNorm(value, 0.0, basis_DK)
    return SharedNorm(value, *_advanced(basis_DK, image_DK, small_KK))


def _advanced(
    basis_DK: Tensor, image_DK: Tensor, small_KK: Tensor
) -> tuple[float, Tensor]:
    """Return the relative residual in σ = √λ, and the next directions."""
    values_K, turn_KK = torch.linalg.eigh((small_KK + small_KK.mT) / 2)
    turn_KK = turn_KK.flip(1)
    images_DK = image_DK @ turn_KK
    largest, top_D = float(values_K[-1]), basis_DK @ turn_KK[:, 0]
    residual_D = images_DK[:, 0] - largest * top_D
    moved_D = top_D - basis_DK[:, 0] * (basis_DK[:, 0] @ top_D)
    error = float(residual_D.norm()) / (2 * largest) if largest > 0 else 0.0
    several = torch.column_stack((top_D, residual_D, moved_D, images_DK[:, 1:]))
    return error, _orthonormal(several)[:, : basis_DK.shape[1]]


def _orthonormal(several_DK: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns, first ones first.

    The largest entry of each is positive: LAPACK's signs are its own affair, and all
    places must have the same.
    """
    length_K = several_DK.norm(dim=0).clamp(min=torch.finfo(several_DK.dtype).tiny)
    basis_DK = torch.linalg.qr(several_DK / length_K).Q
    at_K = basis_DK.abs().argmax(0, keepdim=True)
    sign_K = torch.where(basis_DK.gather(0, at_K) < 0, -1.0, 1.0)
    signed_DK: Tensor = basis_DK * sign_K
    return signed_DK
