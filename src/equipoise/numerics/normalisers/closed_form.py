"""Normalisers in closed form: softmax and its variants, sigmoid, softpick, and others.

The first group are exponentials over a sum; weights of the second need not sum to 1.

Axes, in this file:  x any leading axes · K key.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.numerics.normalisers.backward import (
    GradientSink,
    Rectified,
    SelfWeighted,
    SpanWeighted,
    risen,
)
from equipoise.numerics.normalisers.interface import (
    Interval,
    Lipschitz,
    LowRank,
    Rows,
    covariance,
    scaled,
)
from equipoise.numerics.normalisers.sensitivity import (
    covariance_theta,
    low_rank_theta,
    sink_theta,
)


def _softmax(z_xK: Tensor, given: Rows) -> Tensor:
    return given.lit(z_xK.softmax(-1))


def _tempered_jacobian(given: Rows, factor_x1: Tensor) -> LowRank:
    """Return J of softmax(factor·z), the factor held fixed."""
    return scaled(covariance(_softmax(given.scaled(factor_x1), given)), factor_x1)


def _tempered_theta(given: Rows, factor_x1: Tensor) -> Interval:
    p_xK = _softmax(given.scaled(factor_x1), given)
    return covariance_theta(p_xK, factor=factor_x1)


@dataclass(frozen=True, slots=True)
class Softmax:
    """e^z / Σ e^z. J = diag(p) − p pᵀ; ‖J‖₂ ≤ ½ and ‖J‖_{∞→1} = θ(p) ≤ 1."""

    name: str = "softmax"
    sums_to_one: bool = True

    def weights(self, given: Rows) -> Tensor:
        return _softmax(given.z_xK, given)

    def jacobian(self, given: Rows) -> LowRank:
        return covariance(_softmax(given.z_xK, given))

    def theta(self, given: Rows) -> Interval:
        return covariance_theta(_softmax(given.z_xK, given))

    def lipschitz(self, n: int) -> Lipschitz:
        return _softmax_constants(n, 1.0)


@dataclass(frozen=True, slots=True)
class ScalableSoftmax:
    """softmax(s·ln n·z), n the keys this query sees (SSMax, arXiv 2501.19399).

    n must be the per-query count, not the padded width. With one key the factor is 0,
    which changes nothing.
    """

    s: float | Tensor = 0.43
    name: str = "ssmax"
    sums_to_one: bool = True

    def weights(self, given: Rows) -> Tensor:
        return _softmax(given.scaled(self._factor(given)), given)

    def _factor(self, given: Rows) -> Tensor:
        return self.s * given.n_x1.clamp_min(1).log()

    def jacobian(self, given: Rows) -> LowRank:
        return _tempered_jacobian(given, self._factor(given))

    def theta(self, given: Rows) -> Interval:
        return _tempered_theta(given, self._factor(given))

    def lipschitz(self, n: int) -> Lipschitz:
        return _softmax_constants(n, float(self.s) * math.log(n))


@dataclass(frozen=True, slots=True)
class SinkSoftmax:
    """e^z / (e^b + Σ e^z): a head may attend to nothing.

    b = 0 is softmax-plus-one (Miller 2023); a learned b per head is a learned sink.
    J = diag(α) − α αᵀ with Σα < 1. No exponential of b or of z alone is taken: either
    overflows where all scores are very low or very high.
    """

    b: float | Tensor = 0.0
    name: str = "softmax1"
    sums_to_one: bool = False

    def weights(self, given: Rows) -> Tensor:
        z = given.z_xK
        b = torch.as_tensor(self.b, dtype=z.dtype, device=z.device).unsqueeze(-1)
        weights: Tensor = GradientSink.apply(z, b)  # type: ignore[no-untyped-call]
        return weights

    def jacobian(self, given: Rows) -> LowRank:
        w = self.weights(given)
        return covariance(w, total=torch.ones_like(w[..., :1]))

    def theta(self, given: Rows) -> Interval:
        return sink_theta(self.weights(given))

    def lipschitz(self, n: int) -> Lipschitz:
        # Approached, as the sink's share goes to 0, by what softmax attains.
        at_one_key = Lipschitz(two=0.25, infinity_to_one=0.25)
        return at_one_key if n == 1 else _softmax_constants(n, 1.0)


# β(H) of arXiv 2410.01104, highest power first, as in two public re-implementations.
ADAPTIVE = (-0.037, 0.481, -2.3, 4.917, -1.791)


@dataclass(frozen=True, slots=True)
class AdaptiveTemperature:
    """softmax(β z), β = max(1, polynomial in the entropy of softmax(z)); no training.

    The Jacobian holds β fixed, as its authors use it. Outside 0.849 < H < 5.945 nats
    β is 1: it switches itself off where attention is most dispersed. Coefficients given
    as tensors, broadcast against the rows, are learnable.
    """

    coefficients: tuple[float | Tensor, ...] = ADAPTIVE
    name: str = "adaptive-temperature"
    sums_to_one: bool = True

    def weights(self, given: Rows) -> Tensor:
        return _softmax(given.scaled(self._factor(given)), given)

    def _factor(self, given: Rows) -> Tensor:
        p = _softmax(given.z_xK.detach(), given)
        entropy = -torch.special.xlogy(p, p).sum(-1, keepdim=True)
        return adaptive_factor(entropy, coefficients=self.coefficients)

    def jacobian(self, given: Rows) -> LowRank:
        return _tempered_jacobian(given, self._factor(given))

    def theta(self, given: Rows) -> Interval:
        return _tempered_theta(given, self._factor(given))

    def lipschitz(self, n: int) -> Lipschitz:
        entropy = torch.linspace(0, math.log(max(n, 2)), 10_001, dtype=torch.float64)
        factor = adaptive_factor(entropy, coefficients=self.coefficients)
        return _softmax_constants(n, float(factor.max()), attained=False)


def adaptive_factor(
    entropy: Tensor, *, coefficients: tuple[float | Tensor, ...] = ADAPTIVE
) -> Tensor:
    """Return β of an entropy in nats; 1 where the polynomial is below it.

    Example:
        >>> adaptive_factor(torch.tensor([0.5, 2.0, 6.93]))
        tensor([1.0000, 2.0990, 1.0000])
    """
    beta = torch.zeros_like(entropy)
    for coefficient in coefficients:
        beta = beta * entropy + coefficient
    return torch.where(entropy > 0.5, beta.clamp_min(1.0), torch.ones_like(beta))


def _softmax_constants(n: int, factor: float, *, attained: bool = True) -> Lipschitz:
    """Return ½ and 1 times the factor; one key has nothing to weigh."""
    if n < 2:
        return Lipschitz(two=0.0, infinity_to_one=0.0)
    return Lipschitz(two=factor / 2, infinity_to_one=factor, attained=attained)


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """σ(z + b) with b = −ln n (arXiv 2409.04431): keys do not compete."""

    name: str = "sigmoid"
    sums_to_one: bool = False

    def weights(self, given: Rows) -> Tensor:
        return torch.sigmoid(given.z_xK - given.n_x1.clamp_min(1).log())

    def jacobian(self, given: Rows) -> LowRank:
        w = self.weights(given)
        none = torch.zeros_like(w).unsqueeze(0)
        return LowRank(w * (1 - w), none, none)

    def theta(self, given: Rows) -> Interval:
        total = self.jacobian(given).d_xK.double().sum(-1)
        return Interval(total, total)

    def lipschitz(self, n: int) -> Lipschitz:
        return Lipschitz(two=0.25, infinity_to_one=n / 4)


@dataclass(frozen=True, slots=True)
class Softpick:
    """relu(e^z − 1) / (Σ|e^z − 1| + ε): rectified softmax (arXiv 2504.20966).

    The Jacobian is unbounded as z → 0.
    """

    epsilon: float = 1e-6
    name: str = "softpick"
    sums_to_one: bool = False

    def weights(self, given: Rows) -> Tensor:
        weights: Tensor = Rectified.apply(given.z_xK, self.epsilon)  # type: ignore[no-untyped-call]
        return weights

    def jacobian(self, given: Rows) -> LowRank:
        rise_xK, shift_x1 = risen(given.z_xK)
        unit_x1 = torch.exp(-shift_x1)
        total_x1 = rise_xK.abs().sum(-1, keepdim=True) + self.epsilon * unit_x1
        slope = given.only_seen(rise_xK + unit_x1) / total_x1
        w, right = rise_xK.clamp_min(0) / total_x1, slope * rise_xK.sign()
        return LowRank(slope * (rise_xK > 0), w.unsqueeze(0), right.unsqueeze(0))

    def theta(self, given: Rows) -> Interval:
        return low_rank_theta(self.jacobian(given))

    def lipschitz(self, n: int) -> Lipschitz:
        return Lipschitz(two=math.inf, infinity_to_one=math.inf)


@dataclass(frozen=True, slots=True)
class SelfAdjusted:
    """z ⊙ softmax(z), as published (SA-Softmax, arXiv 2502.18277).

    Weights may be negative, do not sum to 1 and change under a common shift; the
    Jacobian grows without bound: (1 + c)/2 at z = (c, c).
    """

    name: str = "self-adjusted"
    sums_to_one: bool = False

    def weights(self, given: Rows) -> Tensor:
        weights: Tensor = SelfWeighted.apply(given.z_xK)  # type: ignore[no-untyped-call]
        return given.lit(weights)

    def jacobian(self, given: Rows) -> LowRank:
        p, z = given.only_seen(given.z_xK.softmax(-1)), given.only_seen(given.z_xK)
        return LowRank(p * (1 + z), (p * z).unsqueeze(0), p.unsqueeze(0))

    def theta(self, given: Rows) -> Interval:
        return low_rank_theta(self.jacobian(given))

    def lipschitz(self, n: int) -> Lipschitz:
        if n < 2:  # one key: the weight is z itself
            return Lipschitz(two=1.0, infinity_to_one=1.0)
        return Lipschitz(two=math.inf, infinity_to_one=math.inf)


@dataclass(frozen=True, slots=True)
class SafeSelfAdjusted:
    """(z − m + η)/(R + η) ⊙ softmax(z), m = min(z, 0), R = max(z, 0) − m: ours.

    The published normalised form has η = 0: its Jacobian is unbounded as R → 0 and it
    is 0/0 at z = 0. With η it reduces to softmax there. ‖J‖₂ ≤ ½ + (1+√2)/η and
    ‖J‖_{∞→1} ≤ 1 + 2/η (proved in the docs page).
    """

    eta: float = 1.0
    name: str = "self-adjusted-safe"
    sums_to_one: bool = False

    def weights(self, given: Rows) -> Tensor:
        weights: Tensor = SpanWeighted.apply(given.z_xK, self.eta)  # type: ignore[no-untyped-call]
        return given.lit(weights)

    def _slopes(self, given: Rows) -> tuple[Tensor, Tensor]:
        """Return the factor a, and R + η; hidden keys count as 0, as m and M do."""
        z = given.only_seen(given.z_xK)
        low = z.amin(-1, keepdim=True).clamp_max(0)
        span = z.amax(-1, keepdim=True).clamp_min(0) - low + self.eta
        return (z - low + self.eta) / span, span

    def jacobian(self, given: Rows) -> LowRank:
        p = given.only_seen(given.z_xK.softmax(-1))
        z = given.only_seen(given.z_xK)
        a, span = self._slopes(given)
        top = torch.zeros_like(z).scatter(-1, z.argmax(-1, keepdim=True), 1.0)
        least = torch.zeros_like(z).scatter(-1, z.argmin(-1, keepdim=True), 1.0)
        top = top * (z.amax(-1, keepdim=True) > 0)
        least = least * (z.amin(-1, keepdim=True) < 0)
        left = torch.stack([a * p, a * p / span, (1 - a) * p / span])
        return LowRank(a * p + p / span, left, torch.stack([p, top, least]))

    def theta(self, given: Rows) -> Interval:
        z = given.only_seen(given.z_xK)
        pinned = torch.stack([z.argmax(-1), z.argmin(-1)], -1)
        return low_rank_theta(self.jacobian(given), pinned=pinned)

    def lipschitz(self, n: int) -> Lipschitz:
        two = 0.5 + (1 + math.sqrt(2)) / self.eta
        return Lipschitz(two=two, infinity_to_one=1 + 2 / self.eta, attained=False)
