"""Laws read off a sweep: how a threshold moves with depth, what ranks with what."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.errors import InputError


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """y = c · x^exponent, fitted to logarithms."""

    exponent: float
    error: float
    """Standard error of the exponent; NaN for two points."""

    def __str__(self) -> str:
        return f"{self.exponent:+.2f} ± {self.error:.2f}"


def power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """Return the least-squares exponent of y over x.

    >>> round(power_law([1, 2, 4, 8], [1, 0.5, 0.25, 0.125]).exponent, 9)
    -1.0
    """
    if len(x) != len(y) or len(set(x)) < 2 or min(*x, *y) <= 0:
        raise InputError("a power law needs two positive points with different x")
    u, v = np.log(x), np.log(y)
    slope, offset = (float(c) for c in np.polyfit(u, v, 1))
    rest = v - (slope * u + offset)
    spread = float(((u - u.mean()) ** 2).sum())
    error = (
        math.sqrt(float((rest**2).sum()) / (len(x) - 2) / spread)
        if len(x) > 2
        else math.nan
    )
    return PowerLaw(exponent=round(slope, 12), error=error)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's ρ; NaN for fewer than three points or a constant."""
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return math.nan
    from scipy import stats

    return float(stats.spearmanr(x, y).statistic)
