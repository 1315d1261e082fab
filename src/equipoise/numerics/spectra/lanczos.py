"""Lanczos with full reorthogonalisation, and what a random start proves.

Axes, in this file:  N width of the operator · K Krylov step.

For a symmetric operator B and a unit start q, the Lanczos polynomials p_k satisfy
‖p_k(B)q‖ = 1, hence |p_k(λ)|·|⟨q, x⟩| ≤ 1 for every eigenpair (λ, x). To the right of
the largest Ritz value p_k only grows: an eigenvalue λ there would need a start with
|⟨q, x⟩| ≤ 1/p_k(λ), and for q uniform on the sphere

    P(|⟨q, x⟩| ≤ δ) ≤ δ·√(2N/π).

So the λ at which p_k(λ) = √(2N/π)/failure bounds the spectrum from above but for that
probability (van Dorsselaer, Hochstenbach and van der Vorst, 2000; Hochstenbach, 2013).

Of a matrix A (M rows, N columns) Aᵀ(Ax) is formed reading memory once: two products
read 6 MB twice, and memory is what they wait for. Row by row, (a·x)a needs each row
only while it is in the nearest cache: twice as fast on a CPU.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.compiled import COMPILED, compiled, host_view

Array = npt.NDArray[np.floating[Any]]


@compiled(reorder=True)
def _by_fours(a_MN: Array, x_N: Array, inverse: Any, out_N: Array) -> None:
    """Write Aᵀ(Ax), four rows at a time: x and out are then read a quarter as often."""
    M, N = a_MN.shape
    zero = inverse - inverse  # a literal 0 would be float64, half as fast to sum up
    for n in range(N):
        out_N[n] = zero
    for m in range(0, M - 3, 4):
        p = q = r = s = zero
        for n in range(N):
            x = x_N[n]
            p += a_MN[m, n] * x
            q += a_MN[m + 1, n] * x
            r += a_MN[m + 2, n] * x
            s += a_MN[m + 3, n] * x
        p, q, r, s = p * inverse, q * inverse, r * inverse, s * inverse
        for n in range(N):
            some = p * a_MN[m, n] + q * a_MN[m + 1, n]
            out_N[n] += some + r * a_MN[m + 2, n] + s * a_MN[m + 3, n]


def _advance(
    a_MN: Array, basis_KN: Array, k: int, inverse: np.floating[Any]
) -> tuple[float, float]:
    """Write the next direction into the basis; return α and β of this step.

    The second 1/unit comes after the sums, since 1/unit² may not be a float32. The two
    newest directions are removed first, then all, as in ``operator_step``.
    """
    x_N, w_N = basis_KN[k], basis_KN[k + 1]
    _by_fours(a_MN, x_N, inverse, w_N)
    if len(a_MN) % 4:
        left_MN = a_MN[len(a_MN) - len(a_MN) % 4 :]
        w_N += ((left_MN @ x_N) * inverse) @ left_MN
    w_N *= inverse
    alpha = float(x_N @ w_N)
    for seen_KN in (basis_KN[max(k - 1, 0) : k + 1], basis_KN[: k + 1]):
        w_N -= (seen_KN @ w_N) @ seen_KN
    beta = math.sqrt(w_N @ w_N)
    if beta > 0:
        w_N /= beta
    return alpha, beta


def _grow(
    a_MN: Array, basis_KN: Array, inverse: np.floating[Any], found_2K: Array
) -> int:
    """Fill the space below its first direction; return the steps taken, 0 if broken."""
    scale, eps = 0.0, float(np.finfo(a_MN.dtype).eps)
    for k in range(found_2K.shape[1]):
        alpha, beta = _advance(a_MN, basis_KN, k, inverse)
        found_2K[:, k] = alpha, beta
        scale = max(scale, abs(alpha) + beta)
        if not math.isfinite(alpha + beta):
            return 0
        if beta <= 8 * eps * scale:
            return k + 1
    return int(found_2K.shape[1])


class Space(NamedTuple):
    """A Krylov space of AᵀA/unit²: its directions and its tridiagonal matrix."""

    basis_KN: Array
    alphas_K: Array
    betas_K: Array

    def projected(self) -> Array:
        """Return the tridiagonal matrix."""
        steps = len(self.alphas_K)
        T_KK = np.zeros((steps, steps))
        T_KK.flat[:: steps + 1] = self.alphas_K
        T_KK.flat[1 :: steps + 1] = self.betas_K[:-1]
        T_KK.flat[steps :: steps + 1] = self.betas_K[:-1]
        return T_KK


def space(
    matrix_MN: Tensor, start_N: Array, *, steps: int, unit: float = 1.0
) -> Space | None:
    """Return the space that some steps span, at once; None if a number is broken.

    The space closes early where a product leaves it by no more than rounding. For a
    plain CPU matrix only (see ``fused``).

    >>> import torch
    >>> space(torch.diag(torch.tensor([2.0, 1.0])), np.array([1, 0]), steps=2).alphas_K
    array([4.])
    """
    a_MN = host_view(matrix_MN)
    steps = min(steps, a_MN.shape[1])
    basis_KN = np.empty((steps + 1, a_MN.shape[1]), a_MN.dtype)
    basis_KN[0] = start_N / np.linalg.norm(start_N)
    found_2K = np.empty((2, steps))
    with np.errstate(all="ignore"):  # a broken number is found by its value
        taken = _grow(a_MN, basis_KN, a_MN.dtype.type(1 / unit), found_2K)
    return Space(basis_KN[:taken], *found_2K[:, :taken]) if taken else None


Step = Callable[[Tensor, int], tuple[float, float]]
"""(basis, k) → α and β of step k; the next direction is written to basis[k + 1]."""


def operator_step(matvec: Callable[[Tensor], Tensor]) -> Step:
    """Return a Lanczos step of a symmetric operator given by its products.

    α = q·Bq and β = ‖w‖, where w is Bq without its components along the basis. The two
    newest directions are removed first, then all: a single sweep leaves √ε behind when
    Bq lies nearly among the old directions.
    """

    def step(basis_KN: Tensor, k: int) -> tuple[float, float]:
        seen_KN = basis_KN[: k + 1]
        image_N = matvec(seen_KN[-1])
        w_N = swept(seen_KN, swept(seen_KN[-2:], image_N))
        beta = float(w_N.norm())
        basis_KN[k + 1] = w_N / beta if beta > 0 else w_N
        return float(seen_KN[-1] @ image_N), beta

    return step


def matrix_step(matrix_MN: Tensor, unit: float = 1.0) -> Step:
    """Return a Lanczos step of AᵀA/unit², compiled when A is a plain CPU matrix."""
    if not fused(matrix_MN):
        return operator_step(lambda x_N: gram_product(matrix_MN, x_N, unit))
    a_MN = host_view(matrix_MN)
    inverse = a_MN.dtype.type(1 / unit)

    def step(basis_KN: Tensor, k: int) -> tuple[float, float]:
        with np.errstate(all="ignore"):
            return _advance(a_MN, basis_KN.numpy(), k, inverse)

    return step


def fused(matrix_MN: Tensor) -> bool:
    """Whether the compiled loops can read the matrix where it lies."""
    return COMPILED and matrix_MN.is_cpu and matrix_MN.is_contiguous()


def swept(
    basis_KN: Float[Tensor, "K N"], w_N: Float[Tensor, "N"]
) -> Float[Tensor, "N"]:
    """Return w without its components along an orthonormal basis, on any device.

    >>> import torch
    >>> swept(torch.tensor([[1.0, 0.0]]), torch.tensor([3.0, 4.0]))
    tensor([0., 4.])
    """
    return (w_N - (basis_KN @ w_N) @ basis_KN).detach()


def gram_product(
    matrix_MN: Float[Tensor, "M N"], x_N: Float[Tensor, "N"], unit: Tensor | float = 1.0
) -> Float[Tensor, "N"]:
    """Return Aᵀ(Ax)/unit², dividing between the products so that neither overflows.

    >>> import torch
    >>> gram_product(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 1.0]))
    tensor([4., 1.])
    """
    half_M = (matrix_MN @ x_N) / unit
    return (matrix_MN.mT @ (half_M / unit)).detach()


Matvec = Callable[[Tensor], Tensor]
Small = npt.NDArray[np.float64]


class Krylov:
    """The Krylov space of a symmetric operator, grown one product at a time."""

    def __init__(self, step: Step, start_N: Tensor, *, at_most: int) -> None:
        self.step = step
        self.width = start_N.shape[0]
        self.at_most = min(at_most, self.width)
        self.basis_KN = start_N.new_empty(self.at_most + 1, self.width)
        self.basis_KN[0] = start_N / start_N.norm()
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.scale = 0.0  # size of the operator, as far as it has been seen

    @property
    def steps(self) -> int:
        return len(self.alphas)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.scale)

    @property
    def closed(self) -> bool:
        """Whether the last product left the space by no more than rounding."""
        eps = torch.finfo(self.basis_KN.dtype).eps
        return self.steps == self.width or self.betas[-1] <= 8 * eps * self.scale

    def grow(self) -> None:
        alpha, beta = self.step(self.basis_KN, self.steps)
        self.alphas.append(alpha)
        self.betas.append(beta)
        # Sums, not max: max(scale, nan) may be the scale.
        self.scale = max(self.scale, abs(alpha) + beta) + 0 * (alpha + beta)

    def projected(self) -> Small:
        """Return the operator on the space: tridiagonal, small, float64."""
        off_K = self.betas[:-1]
        return np.diag(self.alphas) + np.diag(off_K, 1) + np.diag(off_K, -1)

    def ritz(self) -> tuple[Small, Small]:
        """Return the Ritz values, ascending, and the weights of their vectors."""
        values_K, weights_KK = np.linalg.eigh(self.projected())
        return values_K, weights_KK

    def top(self) -> float:
        """Return the largest Ritz value."""
        return float(np.linalg.eigvalsh(self.projected())[-1])

    def residual(self, weights_K: Small) -> float:
        """Return ‖Bx − θx‖ of a Ritz pair: what the last product left outside."""
        return self.betas[-1] * abs(float(weights_K[-1]))

    def vector(self, weights_K: Small) -> Tensor:
        """Return the unit vector Σ weights·basis."""
        basis_KN = self.basis_KN[: self.steps]
        x_N = torch.from_numpy(weights_K).to(basis_KN) @ basis_KN
        unit_N: Tensor = x_N / x_N.norm()
        return unit_N


class Growth:
    """log p_k at one point, carried from step to step.

    β_k p_{k+1} = (λ − α_k) p_k − β_{k−1} p_{k−1}, as ratios of neighbours: p_k itself
    overflows after some hundred steps. −∞ once a Ritz value has passed the point.
    """

    def __init__(self, at: float) -> None:
        self.at = at
        self.log = 0.0
        self.pull = 0.0

    def take(self, alpha: float, beta: float) -> None:
        ratio = self.at - alpha - self.pull
        if not ratio > 0 or self.log == -math.inf:
            self.log = -math.inf
            return
        self.pull = beta * beta / ratio
        self.log += math.log(ratio / beta) if beta > 0 else math.inf


def growth(krylov: Krylov, at: float, *, sign: int = 1) -> Growth:
    """Return the growth at a point beyond the right (or, sign −1, left) end."""
    grown = Growth(sign * at)
    for alpha, beta in zip(krylov.alphas, krylov.betas, strict=True):
        grown.take(sign * alpha, beta)
    return grown


def needed(N: int, *, failure: float) -> float:
    """Return log p_k above which the chance of a larger eigenvalue is ``failure``."""
    return 0.5 * math.log(2 * N / math.pi) - math.log(failure)


def beyond(krylov: Krylov, end: float, *, failure: float, sign: int = 1) -> float:
    """Return how far the spectrum may reach past ``end``, its extreme Ritz value."""
    target = needed(krylov.width, failure=failure)
    low, high = krylov.scale * 2.0**-60, krylov.scale
    while growth(krylov, end + sign * high, sign=sign).log < target:
        high *= 2
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        enough = growth(krylov, end + sign * middle, sign=sign).log >= target
        low, high = (low, middle) if enough else (middle, high)
    return high
