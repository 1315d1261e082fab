"""How much one more sample moves a mean loss: identities, bounds, laws.

Axes, in this file:  S sample · D direction of a subspace · N parameter.

With ℓ_i the loss of sample i and 𝓛_k the mean of the first k,

    𝓛_{k+1} − 𝓛_k = (ℓ_{k+1} − 𝓛_k)/(k+1)

at every w, whatever the network. All that curvature can say is how ℓ_{k+1} − 𝓛_k
changes as w leaves a point; the 1/k in front is a property of running means.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError


def loss_differences(loss_S: Float[Tensor, "*x S"]) -> Float[Tensor, "*x k"]:
    """Return 𝓛_{k+1} − 𝓛_k for k = 1 … S−1, by the identity.

    >>> loss_differences(torch.tensor([1.0, 3.0, 5.0]))
    tensor([1., 1.])
    """
    S = loss_S.shape[-1]
    if S < 2:
        raise InputError(f"{S} samples: a difference needs two")
    wide_S = loss_S.double()
    k_k = torch.arange(1, S, device=loss_S.device, dtype=torch.float64)
    mean_k = wide_S.cumsum(-1)[..., :-1] / k_k
    return ((wide_S[..., 1:] - mean_k) / (k_k + 1)).to(loss_S.dtype)


def batch_difference(
    new_mean: float, old_mean: float, *, samples: int, batch: int
) -> float:
    """Return 𝓛_{k+b} − 𝓛_k = b/(k+b)·(mean of the new − mean of the old).

    >>> batch_difference(3.0, 1.0, samples=3, batch=1)
    0.5
    """
    _positive(samples=samples, batch=batch)
    return batch / (samples + batch) * (new_mean - old_mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How a new sample differs from the mean of the old ones at w₀, and how far w is.

    The bound with its remainder holds around any w₀, a minimiser or not:

        |𝓛_{k+1} − 𝓛_k|(w) ≤ [a + ‖g‖r + ½‖H‖r² + (ρ/3)r³]/(k+1),   r = ‖w − w₀‖

    with a, g, H the gaps of value, gradient and Hessian between ℓ_{k+1} and 𝓛_k at w₀,
    and ρ a Lipschitz constant of every sample's Hessian on the way: two remainders of
    ρr³/6 each. Without the last term it is false.
    """

    value: float
    gradient: float
    hessian: float
    lipschitz: float
    distance: float

    def __post_init__(self) -> None:
        for name in ("value", "gradient", "hessian", "lipschitz", "distance"):
            if getattr(self, name) < 0:
                raise InputError(
                    f"{name} {getattr(self, name)}: a size is not negative"
                )

    @property
    def numerator(self) -> float:
        """Return the bracket: what is divided by k+1."""
        r = self.distance
        return (
            self.value
            + self.gradient * r
            + self.hessian * r**2 / 2
            + self.lipschitz * r**3 / 3
        )

    def bound(self, samples: int) -> float:
        """Return the most that sample k+1 can move the mean of k.

        >>> Gap(value=0, gradient=0, hessian=0, lipschitz=24, distance=1).bound(1)
        4.0
        """
        _positive(samples=samples)
        return self.numerator / (samples + 1)

    def sufficient(self, target: float) -> int:
        """Return k*: from that many samples on, no sample moves the mean by more.

        >>> Gap(value=1, gradient=0, hessian=0, lipschitz=0, distance=0).sufficient(0.1)
        9
        """
        if not target > 0:
            raise InputError(f"target {target}: give a positive difference")
        return max(1, math.ceil(self.numerator / target) - 1)


def expected_square(variance: float, samples: int) -> float:
    """Return E(𝓛_{k+1} − 𝓛_k)² = Var ℓ/(k(k+1)) for exchangeable samples.

    Exact also without replacement, with the variance of the population (divisor S−1).

    >>> expected_square(6.0, 2)
    1.0
    """
    _positive(samples=samples)
    return variance / (samples * (samples + 1))


def sufficient_samples(variance: float, target: float) -> int:
    """Return k* by the variance law: the least k with RMS difference ≤ target.

    >>> sufficient_samples(1.0, 0.1)
    10
    """
    if not target > 0 or not variance >= 0:
        raise InputError("a positive target and a variance are needed")
    return max(1, math.ceil((math.sqrt(1 + 4 * variance / target**2) - 1) / 2))


def takeuchi(
    hessian_NN: Float[Tensor, "N N"],
    covariance_NN: Float[Tensor, "N N"],
    *,
    samples: int,
    damping: float = 0.0,
) -> float:
    """Return tr(H⁻¹C)/(2k): how far a minimiser of k samples is from the best, in loss.

    H the Hessian of the expected loss at its minimiser, C the covariance of single
    gradients there (Takeuchi, 1976). An asymptotic law for a regular minimum: H must
    be positive definite; ``damping`` adds a multiple of the identity.

    >>> takeuchi(2 * torch.eye(3), 4 * torch.eye(3), samples=10)
    0.3
    """
    _positive(samples=samples)
    values_N, vectors_NN = torch.linalg.eigh(hessian_NN.double())
    values_N = values_N + damping
    if not float(values_N[0]) > 0:
        raise InputError(
            f"the Hessian is not positive definite (smallest eigenvalue "
            f"{float(values_N[0]):.3g}): no minimum, or give damping"
        )
    spread_N = torch.einsum(
        "na,nm,ma->a", vectors_NN, covariance_NN.double(), vectors_NN
    )
    return float((spread_N / values_N).sum() / (2 * samples))


def delta_two(
    value: float,
    slope_D: Float[Tensor, "D"],
    bend_DD: Float[Tensor, "D D"],
    *,
    sigma: float,
) -> float:
    """Return E(𝓛_{k+1} − 𝓛_k)² over w = w₀ + σUz, z normal, for a quadratic difference.

        a² + aσ²·tr B + σ²‖c‖² + (σ⁴/4)(2 tr B² + (tr B)²)

    a, c and B are value, gradient and Hessian of the difference along the columns of
    U, for instance the top eigenvectors (Kiselev et al.).

    >>> delta_two(1.0, torch.zeros(1), torch.zeros(1, 1), sigma=0.1)
    1.0
    """
    if not sigma >= 0:
        raise InputError(f"sigma {sigma}: a standard deviation is not negative")
    B_DD, c_D = bend_DD.double(), slope_D.double()
    trace, square = float(B_DD.trace()), float((B_DD @ B_DD).trace())
    return (
        value**2
        + value * sigma**2 * trace
        + sigma**2 * float(c_D @ c_D)
        + sigma**4 / 4 * (2 * square + trace**2)
    )


def log_slope(size_k: Float[Tensor, "k"], *, first: int, last: int) -> float:
    """Return the slope of ln size over ln k for k = first … last (k starts at 1).

    >>> round(log_slope(1 / torch.arange(1, 100).double(), first=5, last=50), 6)
    -1.0
    """
    if not 1 <= first < last <= len(size_k):
        raise InputError(f"{first} … {last} is no range within 1 … {len(size_k)}")
    k = torch.arange(first, last + 1, dtype=torch.float64).log()
    y = size_k[first - 1 : last].double().log()
    return float(((k - k.mean()) * y).sum() / ((k - k.mean()) ** 2).sum())


def _positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{name} {count}: at least one is needed")
