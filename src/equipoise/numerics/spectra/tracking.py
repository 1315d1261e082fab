"""A spectral norm followed over training: a fixed number of steps, and no sync.

Axes, in this file:  M rows · N columns · K Krylov step.

Nothing here looks at a number on the host, so nothing waits for the device. The price:
no tolerance. The residual says afterwards how good the answer was.

One vector is not enough to follow a norm: where the two largest singular values cross,
it stays with what is now the second, and its residual is as small as before. So a
second vector follows the largest value beside the first, and takes over when it is the
larger. It is disturbed a little every time, which finds what no vector followed yet.

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
from equipoise.numerics.compiled import host_view, to_device
from equipoise.numerics.spectra.lanczos import (
    Array,
    fused,
    gram_product,
    space,
    swept,
)

COLD_STEPS = 32
WARM_STEPS = 4
DISTURBED = 0.1
"""Length of the random part that is added to the second vector, of length 1."""
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
    second: Tensor
    """The vector of the next Ritz value; zero after a single step."""


class Tracked(NamedTuple):
    """A norm, how well it is known, and where the next call should start."""

    value: Tensor
    """σ ≤ ‖A‖₂ up to rounding."""
    vectors_2N: Tensor
    """The vector of σ, and the second one."""
    error: Tensor
    """A singular value lies within this of σ, and the one that the second vector
    follows, if it was asked, is no larger than σ by more."""


@torch.no_grad()
def tracked_norm(
    matrix_MN: Float[Tensor, "M N"],
    *,
    start: Tensor | None = None,
    compare: int | None = 0,
) -> Tracked:
    """Return ‖A‖₂ from below, and the vectors to start the next call with.

    32 steps when cold, 4 for each vector when warm. ``compare`` numbers the calls, each
    of which disturbs the second vector differently; with None it is not asked, which
    halves the cost. Use ``fixed_steps`` to choose the steps.

    >>> found = tracked_norm(torch.diag(torch.tensor([3.0, 4.0]))).value
    >>> round(float(found), 4)
    4.0
    """
    matrix_MN = _matrix(matrix_MN, WARM_STEPS)
    if fused(matrix_MN):
        return Tracked(*_tensors(_tracked_on_cpu(matrix_MN, start, compare), matrix_MN))
    if start is None:
        found = fixed_steps(matrix_MN, steps=COLD_STEPS)
        vectors_2N = torch.stack((found.vector, found.second))
        return Tracked(found.value, vectors_2N, found.residual)
    first, second = start if start.ndim == 2 else (start, torch.zeros_like(start))
    found = fixed_steps(matrix_MN, start=first, steps=WARM_STEPS)
    if compare is None:
        vectors_2N = torch.stack((found.vector, second.to(found.vector)))
        return Tracked(found.value, vectors_2N, found.residual)
    beside_N = _beside(found.vector, second, seed=compare)
    return _larger(found, fixed_steps(matrix_MN, start=beside_N, steps=WARM_STEPS))


def _beside(first_N: Tensor, second_N: Tensor, *, seed: int) -> Tensor:
    """Return the second vector without the first, of length 1, disturbed."""
    usable = second_N.isfinite().all() & (second_N != 0).any()
    random_N = _random(first_N, seed=seed)
    second_N = torch.where(usable, second_N.to(first_N), random_N)
    second_N = second_N - first_N * (first_N @ second_N)
    tiny = torch.finfo(first_N.dtype).tiny
    second_N = second_N / second_N.norm().clamp(min=tiny)
    disturbed_N: Tensor = second_N + random_N * (DISTURBED / random_N.norm())
    return disturbed_N


def _larger(one: Steps, other: Steps) -> Tracked:
    """Return the larger of two values; the other vector is the second one then."""
    swap = other.value > one.value
    value = torch.where(swap, other.value, one.value)
    vectors_2N = torch.stack((one.vector, other.vector))
    vectors_2N = torch.where(swap, vectors_2N.flip(0), vectors_2N)
    reach = torch.maximum(one.value + one.residual, other.value + other.residual)
    own = torch.where(swap, other.residual, one.residual)
    return Tracked(value, vectors_2N, torch.maximum(reach - value, own))


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
    if fused(matrix_MN):
        start_N = None if start is None else _host_starts(start[None], matrix_MN)[0]
        read = _on_cpu(matrix_MN, _unit(matrix_MN), start_N, steps)
        value, vectors_2N, residual = _tensors(read, matrix_MN)
        return Steps(value, residual, vectors_2N[0], vectors_2N[1])
    low, high = matrix_MN.aminmax()
    scale = torch.maximum(-low, high)
    # Also where the matrix is all zero, or subnormal and without an inverse.
    unit = scale.clamp(min=torch.finfo(scale.dtype).tiny)
    begin_N = _start(matrix_MN, start)
    basis_KN, alphas_K, betas_K = _lanczos(matrix_MN, unit, begin_N, steps)
    T_KK = torch.diag(alphas_K)
    T_KK = T_KK + torch.diag(betas_K[:-1], 1) + torch.diag(betas_K[:-1], -1)
    y_K = _top(T_KK)
    value = (y_K @ T_KK @ y_K).clamp(min=0).sqrt()
    residual = betas_K[-1] * y_K[-1].abs() / torch.where(value == 0, 1.0, value)
    next_K = _top(T_KK - torch.outer(y_K, y_K) * value.square())
    next_K = next_K - y_K * (y_K @ next_K)
    vectors_2N = torch.stack((y_K, next_K)) @ basis_KN
    broken = torch.where(scale.isfinite(), 1.0, torch.nan)
    return Steps(value * unit * broken, residual * unit * broken, *vectors_2N)


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


def _random(like: Tensor, *, seed: int = 0) -> Tensor:
    """Return a random vector of the columns' length, of a generator of our own."""
    generator = torch.Generator().manual_seed(seed)
    random_N = torch.randn(like.shape[-1], generator=generator)
    return to_device(random_N.to(like.dtype), like.device)


def _fits(start: Tensor, matrix_MN: Tensor) -> None:
    if start.shape != matrix_MN.shape[1:]:
        N = matrix_MN.shape[1]
        raise InputError(f"start has shape {tuple(start.shape)}, expected ({N},)")


class _Read(NamedTuple):
    """A norm on the host, where a small NumPy call costs less than one of torch."""

    value: float
    vectors_2N: Array
    error: float


def _tracked_on_cpu(
    matrix_MN: Tensor, start: Tensor | None, compare: int | None
) -> _Read:
    """``tracked_norm`` in compiled loops: there is no device to wait for."""
    unit = _unit(matrix_MN)
    if start is None:
        return _on_cpu(matrix_MN, unit, None, COLD_STEPS)
    start_2N = _host_starts(start.reshape(-1, start.shape[-1]), matrix_MN)
    second_N = start_2N[1] if len(start_2N) > 1 else np.zeros_like(start_2N[0])
    one = _on_cpu(matrix_MN, unit, start_2N[0], WARM_STEPS)
    if compare is None:
        return one._replace(vectors_2N=np.stack((one.vectors_2N[0], second_N)))
    random_N = _random(matrix_MN, seed=compare).numpy()
    beside_N = _host_beside(one.vectors_2N[0], second_N, random_N)
    other = _on_cpu(matrix_MN, unit, beside_N, WARM_STEPS)
    vectors_2N = np.stack((one.vectors_2N[0], other.vectors_2N[0]))
    reach = max(one.value + one.error, other.value + other.error)
    if other.value > one.value:
        one, vectors_2N = other, vectors_2N[::-1].copy()
    return _Read(one.value, vectors_2N, max(reach - one.value, one.error))


def _host_beside(first_N: Array, second_N: Array, random_N: Array) -> Array:
    """``_beside`` on the host."""
    second_N = second_N if _usable(second_N) else random_N
    second_N = second_N - first_N * (first_N @ second_N)
    tiny = float(np.finfo(first_N.dtype).tiny)
    second_N /= max(math.sqrt(second_N @ second_N), tiny)
    disturbed_N: Array = second_N + random_N * (DISTURBED / np.linalg.norm(random_N))
    return disturbed_N


def _host_starts(start_xN: Tensor, matrix_MN: Tensor) -> Array:
    _fits(start_xN[0], matrix_MN)
    return host_view(start_xN.detach().to(matrix_MN).contiguous()).copy()


def _usable(start_N: Array) -> bool:
    """A matrix that was broken once must not break every later answer."""
    return 0 < float(np.abs(start_N).max()) < math.inf


def _unit(matrix_MN: Tensor) -> float:
    """Return the largest entry; NaN where one is broken.

    At least the smallest normal number, also where the matrix is all zero, or
    subnormal and without an inverse. Through NumPy: a monitor may not read a scalar
    out of the model's graph.
    """
    low, high = (float(x.numpy()) for x in matrix_MN.aminmax())
    return max(-low, high, torch.finfo(matrix_MN.dtype).tiny)


def _on_cpu(matrix_MN: Tensor, unit: float, start_N: Array | None, steps: int) -> _Read:
    """``fixed_steps`` in compiled loops."""
    if start_N is None or not _usable(start_N):
        start_N = _random(matrix_MN).numpy()
    found = space(matrix_MN, start_N, steps=steps, unit=unit)
    if found is None:
        vectors_2N = np.stack((start_N, np.zeros_like(start_N)))
        return _Read(math.nan, vectors_2N, math.nan)
    values_K, weights_KK = np.linalg.eigh(found.projected())
    value, y_K = math.sqrt(max(0.0, values_K[-1])), weights_KK[:, -1]
    error = found.betas_K[-1] * abs(y_K[-1]) / (value or 1.0)
    vectors_2N = np.zeros((2, start_N.size), start_N.dtype)
    last = min(2, len(values_K))
    weights_2K = np.ascontiguousarray(weights_KK.T[: -last - 1 : -1], start_N.dtype)
    np.matmul(weights_2K, found.basis_KN, out=vectors_2N[:last])
    vectors_2N[:last] /= np.linalg.norm(vectors_2N[:last], axis=1, keepdims=True)
    return _Read(unit * value, vectors_2N, float(unit * error))


def _tensors(read: _Read, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    vectors_2N = torch.from_numpy(read.vectors_2N).to(like.dtype)
    return like.new_tensor(read.value), vectors_2N, like.new_tensor(read.error)


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
    random_HR1 = torch.randn(H, R, 1, generator=generator)
    return to_device(random_HR1.to(like_HRR.dtype), like_HRR.device)


def _iterated(power_HRR: Tensor, u_HR1: Tensor, rounds: int) -> Tensor:
    for _ in range(_GRAM_SQUARINGS):
        power_HRR = power_HRR @ power_HRR
        largest = power_HRR.abs().amax((1, 2), keepdim=True)
        power_HRR = power_HRR / torch.where(largest == 0, 1.0, largest)
    for _ in range(rounds):
        u_HR1 = torch.nn.functional.normalize(power_HRR @ u_HR1, dim=1)
    return u_HR1
