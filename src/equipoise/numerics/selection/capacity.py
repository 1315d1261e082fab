"""How many tokens distance can separate: laws, bounds, and the measured critical size.

Axes, in this file:  x any leading axes · N chosen key · M head · T size tried.

Laws and bounds: tokens independent and uniform
on a sphere of radius M, weights independent of them (the paper's Assumption 1).

Critical size, the paper's Algorithm 3: per size, the heads' mean d̃ against the heads'
mean E[d̃] by a two-sample Kolmogorov–Smirnov test; the first size not told apart is the
critical one. "Not told apart" is not "equal", so an answer states what the test could
have seen.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError

_EULER_TERM = 1.1544  # 2γ, of the expected maximum of n normals


class RecallBounds(NamedTuple):
    """Bounds of E[N_s]/N at a fixed radius."""

    lower: Float[Tensor, "*x"]
    upper: Float[Tensor, "*x"]


def capacity(width: int, visible: int, *, ratio: float = 1.0, chosen: int = 1) -> float:
    """Return N* ≈ d(a²+b²)²/(8a²b² ln(n−N)), near which separability breaks.

    A law for orders of magnitude, not a bound: chosen tokens weigh a each, the others
    b, ``ratio`` = a/b. Measured recall at N* lies between 0.5 and 0.85.

    Example:
        >>> round(capacity(64, 1024), 1), round(capacity(768, 1024), 1)
        (4.6, 55.4)
    """
    _check(width, visible, ratio, chosen)
    spread = (ratio**2 + 1) ** 2 / (8 * ratio**2)
    return width * spread / math.log(visible - chosen)


def capacity_at(
    width: int, visible: int, recall: float, *, ratio: float = 1.0
) -> float:
    """Return the N at which the recall of flat weights has fallen to a given level.

    N_q ≈ d(a²+b²)²/(4(z_q a² + ab·e_{n−N})²), z_q the normal quantile and e_n the
    expected largest of n normals. Sharper than ``capacity``, and still a law.

    Example:
        >>> round(capacity_at(768, 1024, 0.8), 1)
        45.2
    """
    _check(width, visible, ratio, 1)
    if not 0 < recall < 1:
        raise InputError(f"recall {recall}: give a number between 0 and 1")
    ln = math.log(visible - 1)
    t = math.sqrt(2 * ln)
    largest = t - (math.log(ln) + math.log(4 * math.pi)) / (2 * t)
    largest += _EULER_TERM / (2 * t)
    reach = NormalDist().inv_cdf(recall) * ratio**2 + ratio * largest
    return width * (ratio**2 + 1) ** 2 / (4 * reach**2) if reach > 0 else math.inf


def sphere_recall(
    weights: Float[Tensor, "*x N"], radius: Tensor | float, *, width: int
) -> RecallBounds:
    """Return our bounds of E[N_s]/N for tokens uniform on the unit sphere.

    X_i = ‖Σ_{j≠i} α_j x_j‖ has E X_i² = σ_i² = Σ_{j≠i} α_j² and Var X_i² ≤ 2σ_i⁴/d, so
    by Chebyshev P(X_i ≤ r) ≥ 1 − 2/(d(ρ²−1)²) for ρ = r/σ_i > 1, and ≤ 2/(d(1−ρ²)²)
    below. For tokens of length M divide the radius by M.

    Example:
        >>> sphere_recall(torch.full((8,), 0.1), 0.5, width=64).lower
        tensor(0.9953, dtype=torch.float64)
    """
    if width < 1:
        raise InputError(f"width {width}: give the dimension of the tokens")
    w_xN = weights.double()
    spread_xN = _spread_of_others(w_xN)
    r_x1 = torch.as_tensor(radius, dtype=torch.float64, device=w_xN.device)[..., None]
    # σ = 0: the chosen token is alone, and X is 0.
    over_xN = r_x1.square() / spread_xN - 1
    tail_xN = 2 / (width * over_xN.square())
    lower_xN = torch.where(over_xN > 0, 1 - tail_xN, 0.0).clamp(0.0, 1.0)
    upper_xN = torch.where(over_xN < 0, tail_xN, 1.0).clamp(0.0, 1.0)
    alone_xN = (spread_xN == 0).expand_as(lower_xN)
    lower_xN = lower_xN.masked_fill(alone_xN, 1.0)
    return RecallBounds(lower_xN.mean(-1), upper_xN.mean(-1))


def published_sphere_recall(
    weights: Float[Tensor, "*x N"],
    radius: Tensor | float,
    *,
    gap: float,
    clamped: bool = False,
) -> RecallBounds:
    """Return Theorem 2 as rebuilt, for unit tokens at least ``gap`` = δ apart.

    1 − Σξ_i/(rN) ≤ E[N_s]/N ≤ Σexp(−(ξ_i−r)²/2)/N, with ξ_i² = Σα_j² + (1−δ²/2)
    Σ_{j≠k}α_jα_k over the others. The display was not found; the upper bound, so
    rebuilt, is false, ``clamped`` to (ξ_i−r)₊ or not: see ``equipoise claims``.
    """
    w_xN = weights.double()
    own_xN = _spread_of_others(w_xN)
    mass_xN = w_xN.sum(-1, keepdim=True) - w_xN
    cross_xN = (mass_xN.square() - own_xN) * (1 - gap**2 / 2)
    xi_xN = (own_xN + cross_xN).clamp_min(0.0).sqrt()
    r_x1 = torch.as_tensor(radius, dtype=torch.float64, device=w_xN.device)[..., None]
    lower_x = 1 - (xi_xN / r_x1).mean(-1)
    above_xN = (xi_xN - r_x1).clamp_min(0.0) if clamped else xi_xN - r_x1
    upper_x = (-above_xN.square() / 2).exp().mean(-1)
    return RecallBounds(lower_x, upper_x)


def _spread_of_others(w_xN: Tensor) -> Tensor:
    """Return σ_i² = Σ_{j≠i} α_j², 0 exactly for a single key."""
    others = w_xN.square().sum(-1, keepdim=True) - w_xN.square()
    return others.clamp_min(0.0) if w_xN.shape[-1] > 1 else torch.zeros_like(w_xN)


def _check(width: int, visible: int, ratio: float, chosen: int) -> None:
    if width < 1 or ratio <= 0 or visible - chosen < 2:
        raise InputError(
            f"width {width}, ratio {ratio}, {chosen} of {visible} keys: the law needs "
            "a positive width and ratio and at least two keys left over"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalTop:
    """Algorithm 3's answer with what its test could have seen."""

    top: int | None
    """First size at which the test is silent; None when it never was."""
    p_values: dict[int, float]
    """Per size, of D at least as large for two samples of one distribution."""
    level: float
    detectable: float
    """Shift, in standard deviations of heads, that is seen 4 times in 5."""


def ks_statistic(a_M: Float[Tensor, " M"], b_M: Float[Tensor, " M"]) -> float:
    """Return the largest gap between two empirical distributions; NaN for NaN.

    Example:
        >>> ks_statistic(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0]))
        1.0
    """
    if a_M.ndim != 1 or b_M.ndim != 1 or not a_M.numel() * b_M.numel():
        raise InputError(
            f"two samples are compared, each a row of numbers, not shapes "
            f"{tuple(a_M.shape)} and {tuple(b_M.shape)}"
        )
    both = torch.cat([a_M, b_M]).double()
    if both.isnan().any():
        return math.nan
    below_a = torch.searchsorted(a_M.double().sort().values, both, right=True)
    below_b = torch.searchsorted(b_M.double().sort().values, both, right=True)
    return float((below_a / len(a_M) - below_b / len(b_M)).abs().max())


def ks_p_value(statistic: float, size: int) -> float:
    """Return P(D ≥ statistic) for two samples of ``size`` each from one distribution.

    Exact, by reflection of lattice paths: with D = k/m,
    P = 2 Σ_{j≥1} (−1)^{j−1} C(2m, m−jk)/C(2m, m). Ties make it conservative.

    Example:
        >>> ks_p_value(1.0, 2)  # 2 of the 6 ways to interleave 2 and 2
        0.3333333333333333
    """
    if math.isnan(statistic):
        return math.nan
    k = round(statistic * size)
    if k == 0:
        return 1.0
    whole = math.comb(2 * size, size)
    terms = range(1, size // k + 1)
    signed = ((1, -1)[j % 2 == 0] * math.comb(2 * size, size - j * k) for j in terms)
    return 2 * sum(signed) / whole


@lru_cache
def ks_threshold(size: int, level: float) -> float:
    """Return the least D that a test at this level rejects; 2 when none is."""
    steps = range(1, size + 1)
    k = bisect_left(steps, -level, key=lambda k: -ks_p_value(k / size, size))
    return steps[k] / size if k < size else 2.0


def ks_power(
    shift: float,
    size: int,
    *,
    generator: torch.Generator,
) -> float:
    """Return how often two normal samples a ``shift`` (in σ) apart are told apart."""
    pairs = _pairs(size, 2000, generator)
    return _seen(pairs, shift, ks_threshold(size, 0.01))


def detectable_shift(
    size: int,
    *,
    generator: torch.Generator,
    level: float = 0.01,
) -> float:
    """Return the shift (in σ of heads) the test sees 4 times in 5; inf if none."""
    threshold = ks_threshold(size, level)
    if threshold > 1:
        return math.inf
    pairs = _pairs(size, 500, generator)  # one set: power then grows with the shift
    low, high = 0.0, 16.0
    for _ in range(10):
        middle = (low + high) / 2
        seen = _seen(pairs, middle, threshold) >= 0.8
        low, high = (low, middle) if seen else (middle, high)
    return high


def _pairs(size: int, draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return two independent normal samples per draw, each sorted."""
    both = torch.randn(2, draws, size, generator=generator, dtype=torch.float64)
    a, b = both.sort(-1).values
    return a, b


def _seen(pairs: tuple[Tensor, Tensor], shift: float, threshold: float) -> float:
    """Return the share of pairs whose D reaches the threshold once one is shifted."""
    a, b = pairs[0], pairs[1] + shift
    both, size = torch.cat([a, b], -1), a.shape[-1]
    gap = torch.searchsorted(a, both, right=True)
    gap = gap - torch.searchsorted(b, both, right=True)
    return float((gap.abs().amax(-1) >= threshold * size - 0.5).double().mean())


def critical_top(
    true_TM: Float[Tensor, "T M"],
    random_TM: Float[Tensor, "T M"],
    tops: list[int],
    *,
    generator: torch.Generator,
    level: float = 0.01,
) -> CriticalTop:
    """Return the first size at which heads' d̃ and E[d̃] are not told apart.

    Args:
        true_TM: Mean d̃ over queries, per size and head.
        random_TM: Mean E[d̃], likewise.
        tops: The sizes, increasing.
        generator: For the power, which is simulated.
        level: The paper says 0.01 in its text and 0.05 in its pseudo-code.

    Example:
        >>> true = torch.tensor([[9.0] * 20, [1.0] * 20])
        >>> rng = torch.Generator().manual_seed(0)
        >>> critical_top(true, torch.ones(2, 20), [5, 10], generator=rng).top
        10
    """
    if true_TM.shape != random_TM.shape or true_TM.shape[:1] != (len(tops),):
        raise InputError(
            f"{len(tops)} sizes need two tables of (sizes, heads), not "
            f"{tuple(true_TM.shape)} and {tuple(random_TM.shape)}"
        )
    size = true_TM.shape[1]
    found = {
        top: ks_p_value(ks_statistic(true_M, random_M), size)
        for top, true_M, random_M in zip(tops, true_TM, random_TM, strict=True)
    }
    return CriticalTop(
        top=next((top for top, p in found.items() if p > level), None),
        p_values=found,
        level=level,
        detectable=detectable_shift(size, generator=generator, level=level),
    )
