"""Sparsemax and α-entmax: weights that can be exactly zero.

Axes, in this file:  x any leading axes · K key.
The projections are solved here, not by the ``entmax`` library: it sorts or bisects, at
several times the cost, and fails on fully masked rows, NaN, 16-bit bisection and α near
1. Tests hold ours against it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.normalisers import threshold
from equipoise.numerics.normalisers.interface import (
    Interval,
    Lipschitz,
    LowRank,
    Rows,
    covariance,
    scaled,
)
from equipoise.numerics.normalisers.sensitivity import covariance_theta

# ∂p/∂α is a difference of terms of size 1/(α − 1)²: below this float32 has no digits.
LEAST_ALPHA = 1.01


@dataclass(frozen=True, slots=True)
class Entmax:
    """[(α−1)z − t]₊^{1/(α−1)} with t such that the weights sum to 1 (arXiv 1905.05702).

    α = 2 is sparsemax; between 1 and 2 the weights go from softmax to sparsemax. A
    tensor α (per head, broadcast against the given) is learnable. J = diag(g) − g gᵀ/G
    with g = p^{2−α} on the support, so ‖J‖_{∞→1} = G·θ(g/G).
    """

    alpha: float | Tensor = 1.5
    name: str = "entmax"
    sums_to_one: bool = True

    def __post_init__(self) -> None:
        fixed = isinstance(self.alpha, int | float)
        if fixed and not LEAST_ALPHA <= self.alpha <= 2:
            raise InputError(
                f"entmax needs {LEAST_ALPHA} ≤ α ≤ 2, not {self.alpha}: use softmax "
                "for α = 1; beyond 2 the Jacobian is unbounded"
            )

    def weights(self, given: Rows) -> Tensor:
        return given.lit(projected(given.z_xK, self.alpha))

    def jacobian(self, given: Rows) -> LowRank:
        p = given.only_seen(projected(given.z_xK, self.alpha))
        return covariance(_slopes(p, self.alpha))

    def theta(self, given: Rows) -> Interval:
        p = given.only_seen(projected(given.z_xK, self.alpha))
        return covariance_theta(_slopes(p, self.alpha))

    def lipschitz(self, n: int) -> Lipschitz:
        alpha = self.alpha
        largest = float(alpha.max()) if isinstance(alpha, Tensor) else alpha
        return _entmax_constants(largest, n)


@dataclass(frozen=True, slots=True)
class ScalableEntmax:
    """entmax((δ + β·(ln n)^γ)·z): ASEntmax of arXiv 2506.16640 with given δ, β, γ.

    There β and γ come from the query, β = softplus(·) and γ = 2 tanh(·); here they are
    arguments, so a module owns the projection.
    """

    beta: float | Tensor = 1.0
    gamma: float | Tensor = 1.0
    delta: float = 1.0
    alpha: float = 1.5
    name: str = "asentmax"
    sums_to_one: bool = True

    def weights(self, given: Rows) -> Tensor:
        return given.lit(projected(given.scaled(self._factor(given)), self.alpha))

    def _factor(self, given: Rows) -> Tensor:
        return self.delta + self.beta * given.n_x1.clamp_min(1).log() ** self.gamma

    def jacobian(self, given: Rows) -> LowRank:
        factor = self._factor(given)
        p = given.only_seen(projected(given.scaled(factor), self.alpha))
        return scaled(covariance(_slopes(p, self.alpha)), factor)

    def theta(self, given: Rows) -> Interval:
        factor = self._factor(given)
        p = given.only_seen(projected(given.scaled(factor), self.alpha))
        return covariance_theta(_slopes(p, self.alpha), factor=factor)

    def lipschitz(self, n: int) -> Lipschitz:
        power = torch.tensor(math.log(max(n, 1)), dtype=torch.float64) ** self.gamma
        factor = float((self.delta + self.beta * power).max())
        base = _entmax_constants(self.alpha, n)
        return Lipschitz(
            two=factor * base.two,
            infinity_to_one=factor * base.infinity_to_one,
            attained=base.attained,
        )


def projected(z_xK: Tensor, alpha: float | Tensor) -> Tensor:
    """Return α-entmax of every row; what a fully hidden row gets is finite."""
    if isinstance(alpha, Tensor):
        alpha = alpha.clamp_min(LEAST_ALPHA).unsqueeze(-1)
    weights: Tensor = threshold.Entmax.apply(z_xK, alpha)  # type: ignore[no-untyped-call]
    return weights


def _slopes(p_xK: Tensor, alpha: float | Tensor) -> Tensor:
    """Return g = p^{2−α} on the support, 0 off it (where p⁰ would read 1)."""
    if isinstance(alpha, Tensor):
        alpha = alpha.clamp_min(LEAST_ALPHA).expand(p_xK.shape[:-1]).unsqueeze(-1)
    return torch.where(p_xK > 0, p_xK ** (2 - alpha), torch.zeros_like(p_xK))


def _entmax_constants(alpha: float, n: int) -> Lipschitz:
    """Return Lip(α, n) in 2→2 and the ∞→1 bound n^{α−1}, attained for even n."""
    if n < 2:
        return Lipschitz(two=0.0, infinity_to_one=0.0)
    total = n ** (alpha - 1)
    even = n % 2 == 0
    return Lipschitz(
        two=entmax_lipschitz(alpha, n), infinity_to_one=total, attained=even
    )


def entmax_lipschitz(alpha: float, n: int) -> float:
    """Return the largest ‖J‖₂ of α-entmax over rows of n ≥ 2 keys.

    max{2^{α−2}, max_p n·g₁g₂/(g₁ + (n−1)g₂)} with g₁ = p^{2−α} of one key and
    g₂ = ((1−p)/(n−1))^{2−α} of the n−1 others: two equal keys, or one against the rest.

    Example:
        >>> round(entmax_lipschitz(1.5, 47), 4), round(entmax_lipschitz(1.5, 1024), 3)
        (0.7071, 0.869)
    """
    p = torch.linspace(0, 1, 20_003, dtype=torch.float64)[1:-1]
    one, rest = p ** (2 - alpha), ((1 - p) / (n - 1)) ** (2 - alpha)
    against = n * one * rest / (one + (n - 1) * rest)
    return max(float(2.0 ** (alpha - 2)), float(against.max()))
