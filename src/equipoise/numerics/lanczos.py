"""Lanczos with full reorthogonalisation, and what a random start proves.

Axes, in this file:  N width of the operator · K Krylov step.

For a symmetric operator B and a unit start q, the Lanczos polynomials p_k satisfy
‖p_k(B)q‖ = 1, hence |p_k(λ)|·|⟨q, x⟩| ≤ 1 for every eigenpair (λ, x). To the right of
the largest Ritz value p_k only grows: an eigenvalue λ there would need a start with
|⟨q, x⟩| ≤ 1/p_k(λ), and for q uniform on the sphere

    P(|⟨q, x⟩| ≤ δ) ≤ δ·√(2N/π).

So the λ at which p_k(λ) = √(2N/π)/failure bounds the spectrum from above but for that
probability (van Dorsselaer, Hochstenbach and van der Vorst, 2000; Hochstenbach, 2013).
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equipoise.numerics.gram import Step

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
