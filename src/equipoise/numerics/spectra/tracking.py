"""A spectral norm followed over training: a fixed number of steps, and no sync.

Axes, in this file:  M rows · N columns · K Krylov step.

Nothing here looks at a number on the host, so nothing waits for the device. The price:
no tolerance. The residual says afterwards how good the answer was.

Axes of heads:  H head · R head width · D model width. Each head's W_Qᵀ W_K and W_O W_V
is never formed: for A, B of shape (R, D), ‖AᵀB‖₂² = λ_max(G_A G_B), with the R × R Gram
matrices A Aᵀ and B Bᵀ. Power iteration on G_A G_B, self-adjoint in the inner product of
G_B: its Rayleigh quotient approaches λ_max from below.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.host_view import host_view
from equipoise.numerics.spectra.lanczos import fused, gram_product, space, swept

COLD_STEPS = 32
WARM_STEPS = 4
# T^(2²⁴) tells apart Ritz values that differ by one part in 10⁷.
_SQUARINGS = 24


class Steps(NamedTuple):
    """What some steps found, still on the device."""

    value: Tensor
    """σ ≤ ‖A‖₂ up to rounding: a Rayleigh quotient never overshoots."""
    residual: Tensor
    """‖Aᵀu − σv‖: a singular value lies within it of σ."""
    vector: Tensor
    """v, the start of the next call."""


class Tracked(NamedTuple):
    """A norm and where the next call should start."""

    value: Tensor
    vector: Tensor


def tracked_norm(
    matrix_MN: Float[Tensor, "M N"], *, start: Tensor | None = None
) -> Tracked:
    """Return ‖A‖₂ from below, and the vector to start the next call with.

    32 steps when cold, 4 when warm; use ``fixed_steps`` to choose, or for the residual.

    >>> found = tracked_norm(torch.diag(torch.tensor([3.0, 4.0]))).value
    >>> round(float(found), 4)
    4.0
    """
    steps = COLD_STEPS if start is None else WARM_STEPS
    found = fixed_steps(matrix_MN, start=start, steps=steps)
    return Tracked(found.value, found.vector)


@torch.no_grad()
def fixed_steps(
    matrix_MN: Float[Tensor, "M N"], *, steps: int, start: Tensor | None = None
) -> Steps:
    """Return the largest Ritz value after ``steps`` Golub–Kahan–Lanczos steps.

    Without a start, one drawn from a generator of our own, seeded with 0. NaN or Inf
    anywhere in the matrix gives NaN.

    >>> fixed_steps(torch.eye(3), steps=1).residual < 1e-6
    tensor(True)
    """
    matrix_MN = _matrix(matrix_MN, steps)
    low, high = matrix_MN.aminmax()
    scale = torch.maximum(-low, high)
    # Also where the matrix is all zero, or subnormal and without an inverse.
    unit = scale.clamp(min=torch.finfo(scale.dtype).tiny)
    if fused(matrix_MN):
        return _on_cpu(matrix_MN, unit, start, steps)
    start_N = _start(matrix_MN, start)
    basis_KN, alphas_K, betas_K = _lanczos(matrix_MN, unit, start_N, steps)
    T_KK = torch.diag(alphas_K)
    T_KK = T_KK + torch.diag(betas_K[:-1], 1) + torch.diag(betas_K[:-1], -1)
    y_K = _top(T_KK)
    value = (y_K @ T_KK @ y_K).clamp(min=0).sqrt()
    vector_N = y_K @ basis_KN
    residual = betas_K[-1] * y_K[-1].abs() / torch.where(value == 0, 1.0, value)
    broken = torch.where(scale.isfinite(), 1.0, torch.nan)
    return Steps(value * unit * broken, residual * unit * broken, vector_N)


def _matrix(matrix_MN: Tensor, steps: int) -> Tensor:
    if matrix_MN.ndim != 2 or 0 in matrix_MN.shape:
        raise InputError(f"a matrix is needed, got shape {tuple(matrix_MN.shape)}")
    if not matrix_MN.dtype.is_floating_point:
        raise InputError(f"a matrix of real floats is needed, got {matrix_MN.dtype}")
    if steps < 1:
        raise InputError(f"steps {steps}: at least one is needed")
    wide = torch.promote_types(matrix_MN.dtype, torch.float32)
    return matrix_MN.detach().to(wide)


def _start(matrix_MN: Tensor, start: Tensor | None) -> Tensor:
    random_N = _random(matrix_MN)
    if start is None:
        return random_N
    _fits(start, matrix_MN)
    # A matrix that was broken once must not break every later answer.
    usable = start.isfinite().all() & (start != 0).any()
    return torch.where(usable, start.to(matrix_MN), random_N)


def _random(matrix_MN: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(matrix_MN.shape[1], generator=generator).to(matrix_MN)


def _fits(start: Tensor, matrix_MN: Tensor) -> None:
    if start.shape != matrix_MN.shape[1:]:
        N = matrix_MN.shape[1]
        raise InputError(f"start has shape {tuple(start.shape)}, expected ({N},)")


def _on_cpu(matrix_MN: Tensor, unit: Tensor, start: Tensor | None, steps: int) -> Steps:
    """The same in compiled loops: there is no device to wait for.

    Through NumPy: a monitor may not read a scalar out of the model's graph.
    """
    start_N = None
    if start is not None:
        _fits(start, matrix_MN)
        start_N = start.detach().to(matrix_MN).contiguous()
    if start_N is None or not 0 < np.abs(host_view(start_N)).max() < math.inf:
        start_N = _random(matrix_MN)
    found = space(matrix_MN, host_view(start_N), steps=steps, unit=float(unit.numpy()))
    if found is None:
        return Steps(unit * torch.nan, unit * torch.nan, start_N)
    off_K = found.betas_K[:-1]
    T_KK = np.diag(found.alphas_K) + np.diag(off_K, 1) + np.diag(off_K, -1)
    values_K, weights_KK = np.linalg.eigh(T_KK)
    value, y_K = math.sqrt(max(0.0, values_K[-1])), weights_KK[:, -1]
    residual = found.betas_K[-1] * abs(y_K[-1]) / (value or 1.0)
    vector_N = y_K @ found.basis_KN
    vector_N /= np.linalg.norm(vector_N)
    return Steps(unit * value, unit * residual, torch.from_numpy(vector_N).to(unit))


def _lanczos(
    matrix_MN: Tensor, unit: Tensor, start_N: Tensor, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    q_N = start_N / start_N.norm()
    basis, alphas, betas = [], [], []
    for _ in range(min(steps, matrix_MN.shape[1])):
        basis.append(q_N)
        seen_KN = torch.stack(basis)
        w_N = gram_product(matrix_MN, q_N, unit)
        alphas.append(q_N @ w_N)
        for _ in range(2):
            w_N = swept(seen_KN, w_N)
        beta = w_N.norm()
        betas.append(beta)
        # A closed space leaves rounding, which must not become a direction.
        tiny = 8 * torch.finfo(w_N.dtype).eps * alphas[0].abs()
        q_N = torch.where(beta > tiny, w_N / beta, 0.0)
    return torch.stack(basis), torch.stack(alphas), torch.stack(betas)


def _top(T_KK: Tensor) -> Tensor:
    """Return the leading eigenvector of a small positive matrix, by squaring it."""
    P_KK = T_KK
    for _ in range(_SQUARINGS):
        P_KK = P_KK / P_KK.norm().clamp(min=torch.finfo(P_KK.dtype).tiny)
        P_KK = P_KK @ P_KK
    column = P_KK.diagonal().argmax().expand(T_KK.shape[0], 1)
    y_K = P_KK.gather(1, column)[:, 0]
    length = y_K.norm()
    first_K = torch.zeros_like(y_K).index_fill(0, column[0], 1.0)
    return torch.where(length == 0, first_K, y_K / length)  # the zero matrix


# (G_A G_B)⁸ is formed once; eight products with it are 64 power steps.
_GRAM_SQUARINGS = 3
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
    u_HR1 = _head_start(gram_a) if start is None else start.unsqueeze(-1).to(gram_a)
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


def _head_start(like_HRR: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    H, R, _ = like_HRR.shape
    return torch.randn(H, R, 1, generator=generator).to(like_HRR)


def _iterated(power_HRR: Tensor, u_HR1: Tensor, rounds: int) -> Tensor:
    for _ in range(_GRAM_SQUARINGS):
        power_HRR = power_HRR @ power_HRR
        largest = power_HRR.abs().amax((1, 2), keepdim=True)
        power_HRR = power_HRR / torch.where(largest == 0, 1.0, largest)
    for _ in range(rounds):
        u_HR1 = torch.nn.functional.normalize(power_HRR @ u_HR1, dim=1)
    return u_HR1
