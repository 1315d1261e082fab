"""Norms of each head's W_Qᵀ W_K and W_O W_V, without forming a D × D matrix.

Axes, in this file:  H head · R head width · D model width.

For A, B of shape (R, D) the product AᵀB has ‖AᵀB‖₂² = λ_max(G_A G_B), with the R × R
Gram matrices A Aᵀ and B Bᵀ. Power iteration on G_A G_B, which is self-adjoint in the
inner product of G_B, so its Rayleigh quotient approaches λ_max from below.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

# (G_A G_B)⁸ is formed once; eight products with it are 64 power steps.
_SQUARINGS = 3
COLD_ROUNDS = 24
WARM_ROUNDS = 4


class HeadNorms(NamedTuple):
    """One norm per head, and where the next call should start."""

    value_H: Tensor
    start_HR: Tensor


@torch.no_grad()
def head_product_norms(
    a_HRD: Float[Tensor, "H R D"],
    b_HRD: Float[Tensor, "H R D"],
    *,
    start: Float[Tensor, "H R"] | None = None,
) -> HeadNorms:
    """Return ‖AᵀB‖₂ of every head from below, and a warm start; nothing synchronises.

    Example:
        >>> a = torch.tensor([[[3.0, 0.0], [0.0, 1.0]]])
        >>> head_product_norms(a, a).value_H.round(decimals=4)
        tensor([9.])
    """
    a_HRD, b_HRD = (
        x.to(torch.promote_types(x.dtype, torch.float32)) for x in (a_HRD, b_HRD)
    )
    gram_a, size_a = _gram(a_HRD)
    gram_b, size_b = _gram(b_HRD)
    u_HR1 = _start(gram_a) if start is None else start.unsqueeze(-1).to(gram_a)
    u_HR1 = _iterated(
        gram_a @ gram_b, u_HR1, COLD_ROUNDS if start is None else WARM_ROUNDS
    )
    image = gram_b @ u_HR1
    below = (u_HR1 * image).sum((1, 2))
    above = (image * (gram_a @ image)).sum((1, 2))
    # A head whose product is zero has 0/0 here, and norm 0.
    square = torch.where(
        below > 0, above / below, torch.where(above == above, 0.0, above)
    )
    return HeadNorms(square.clamp_min(0).sqrt() * size_a * size_b, u_HR1.squeeze(-1))


def _gram(x_HRD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix of x/s, and s: squares neither over- nor underflow."""
    size_H = x_HRD.abs().amax((1, 2))
    size_H = torch.where(size_H == 0, torch.ones_like(size_H), size_H)
    unit_HRD = x_HRD / size_H[:, None, None]
    return torch.einsum("hrd,hsd->hrs", unit_HRD, unit_HRD), size_H


def _start(like_HRR: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    H, R, _ = like_HRR.shape
    return torch.randn(H, R, 1, generator=generator).to(like_HRR)


def _iterated(power_HRR: Tensor, u_HR1: Tensor, rounds: int) -> Tensor:
    for _ in range(_SQUARINGS):
        power_HRR = power_HRR @ power_HRR
        largest = power_HRR.abs().amax((1, 2), keepdim=True)
        power_HRR = power_HRR / torch.where(largest == 0, 1.0, largest)
    for _ in range(rounds):
        u_HR1 = torch.nn.functional.normalize(power_HRR @ u_HR1, dim=1)
    return u_HR1
