"""From which size on a selection looks like a random one, and how sure that is.

Axes, in this file:  M head · T size tried.
The paper's Algorithm 3: per size, the heads' mean d̃ against the heads' mean E[d̃] by a
two-sample Kolmogorov–Smirnov test; the first size not told apart is the critical one.
"Not told apart" is not "equal", so an answer states what the test could have seen.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError


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
    level: float = 0.01,
    draws: int = 2000,
) -> float:
    """Return how often two normal samples a ``shift`` (in σ) apart are told apart."""
    pairs = _pairs(size, draws, generator)
    return _seen(pairs, shift, ks_threshold(size, level))


def detectable_shift(
    size: int,
    *,
    generator: torch.Generator,
    level: float = 0.01,
    power: float = 0.8,
    draws: int = 500,
) -> float:
    """Return the shift (in σ of heads) the test sees with this power; inf if none."""
    threshold = ks_threshold(size, level)
    if threshold > 1:
        return math.inf
    pairs = _pairs(size, draws, generator)  # one set: power then grows with the shift
    low, high = 0.0, 16.0
    for _ in range(10):
        middle = (low + high) / 2
        seen = _seen(pairs, middle, threshold) >= power
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
