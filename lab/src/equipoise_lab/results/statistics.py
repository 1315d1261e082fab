"""Means with their spread, paired comparisons, and laws read off a sweep."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from equipoise.errors import InputError

Runs = dict[int, dict[str, float]]
"""Seed → measure → value."""


@dataclass(frozen=True, kw_only=True)
class SampleSummary:
    """Mean ± standard deviation over seeds."""

    mean: float
    sd: float
    n: int

    def __str__(self) -> str:
        spread = "" if math.isnan(self.sd) else f" ± {self.sd:.2g}"
        return f"{self.mean:.4g}{spread}"


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """The difference of two arms, seed by seed."""

    mean: float
    low: float
    high: float
    """95 % interval of the mean difference, Student's t."""
    p: float
    """Two-sided; with three seeds it can only be small if the effect is very steady."""
    n: int

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.mean:+.4g} in every pair"
        if math.isnan(self.p):
            return f"{self.mean:+.4g}"
        return f"{self.mean:+.4g} [{self.low:+.3g}, {self.high:+.3g}], p = {self.p:.2g}"


def summary(values: Sequence[float]) -> SampleSummary:
    """Return mean and sample deviation; one value has no deviation.

    >>> str(summary([1.0, 2.0, 3.0]))
    '2 ± 1'
    """
    if not values:
        raise InputError("no value to summarise")
    if any(not math.isfinite(v) for v in values):
        # stdlib's stdev refuses infinities; a diverged arm is still a result.
        return SampleSummary(mean=sum(values) / len(values), sd=math.nan, n=len(values))
    sd = statistics.stdev(values) if len(values) > 1 else math.nan
    return SampleSummary(mean=statistics.fmean(values), sd=sd, n=len(values))


def paired(
    arm: Sequence[float], baseline: Sequence[float], *, digits: int | None = None
) -> PairedDifference:
    """Return arm - baseline with its 95 % interval, pair by pair.

    ``digits`` is to how many both were rounded; by that much the interval is wider and
    the difference that is tested smaller, since rounding is no chance.

    >>> str(paired([2.0, 3.1, 4.0], [1.0, 2.0, 3.0]))
    '+1.033 [+0.89, +1.18], p = 0.001'
    >>> str(paired([3.01, 3.02, 3.0], [3.01, 3.02, 3.0], digits=4))
    '+0 [-0.001, +0.001], p = 1'
    """
    if len(arm) != len(baseline) or not arm:
        raise InputError(f"{len(arm)} runs cannot be paired with {len(baseline)}")
    differences = [a - b for a, b in zip(arm, baseline, strict=True)]
    found = summary(differences)
    if found.n < 2 or not math.isfinite(found.sd):
        return PairedDifference(
            mean=found.mean, low=math.nan, high=math.nan, p=math.nan, n=found.n
        )
    from scipy import stats

    lost = 0.0 if digits is None else _lost([*arm, *baseline], digits)
    error = found.sd / math.sqrt(found.n)
    half = float(stats.t.ppf(0.975, found.n - 1)) * error + lost
    tested = max(0.0, abs(found.mean) - lost)
    # No spread at all: the interval is a point, and t says nothing about chance.
    p = 1.0 if lost and not tested else math.nan
    if error:
        p = 2 * float(stats.t.sf(tested / error, found.n - 1))
    return PairedDifference(
        mean=found.mean, low=found.mean - half, high=found.mean + half, p=p, n=found.n
    )


def _lost(values: Sequence[float], digits: int) -> float:
    """Return how far rounding may have moved a difference: half a unit, twice."""
    largest = max(map(abs, values))
    return 10.0 ** (math.floor(math.log10(largest)) + 1 - digits) if largest else 0.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that hold for all comparisons at once (Holm, 1979).

    >>> [round(p, 6) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    found, least = list(p_values), 0.0
    for rank, (p, i) in enumerate(known):
        least = max(least, min(1.0, (len(known) - rank) * p))
        found[i] = least
    return found


def corrected(
    found: Sequence[PairedDifference | None],
) -> list[PairedDifference | None]:
    """Return the comparisons with p-values that hold for all of them at once.

    >>> one = paired([2.0, 3.1, 4.0], [1.0, 2.0, 3.0])
    >>> [round(pair.p / one.p, 6) for pair in corrected([one, one]) if pair]
    [2.0, 2.0]
    """
    known = [(i, pair) for i, pair in enumerate(found) if pair is not None]
    made = list(found)
    for (i, pair), p in zip(known, holm([pair.p for _, pair in known]), strict=True):
        made[i] = replace(pair, p=p)
    return made


def to_decide(found: PairedDifference) -> str:
    """Say how many seeds would show it, where the interval holds 0; else nothing.

    >>> to_decide(paired([0.0, 2.0, 1.0, 3.0], [0.0, 0.0, 1.5, 1.5]))
    ' (22 seeds would show it with 80 % power, were it as large as here)'
    >>> to_decide(paired([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]))
    ' (more than 1000 seeds would be needed)'
    >>> to_decide(paired([2.0, 3.1, 4.0], [1.0, 2.0, 3.0]))
    ''
    """
    if not found.low <= 0 <= found.high:
        return ""
    count = seeds_to_decide(found)
    if count is None:
        return f" (more than {MOST_SEEDS} seeds would be needed)"
    return f" ({count} seeds would show it with 80 % power, were it as large as here)"


MOST_SEEDS = 1000
POWER = 0.8
"""Share of tries in which the seeds named give an interval without 0; a count that just
excludes 0 at the mean found does so in about half of them."""


def seeds_to_decide(found: PairedDifference) -> int | None:
    """Return how many pairs of this mean and spread exclude 0 with 80 % power.

    None where no number up to ``MOST_SEEDS`` would, or where it is decided already.

    >>> seeds_to_decide(paired([0.0, 2.0, 1.0, 3.0], [0.0, 0.0, 1.5, 1.5]))
    22
    """
    if found.n < 2 or not found.low <= 0 <= found.high or not found.mean:
        return None
    from scipy import stats

    sd = (found.high - found.mean) / float(stats.t.ppf(0.975, found.n - 1))
    sd *= math.sqrt(found.n)
    if not power(abs(found.mean) / sd, MOST_SEEDS) >= POWER:
        return None
    few, many = found.n, MOST_SEEDS
    while many - few > 1:  # power grows with the seeds
        middle = (few + many) // 2
        if power(abs(found.mean) / sd, middle) >= POWER:
            many = middle
        else:
            few = middle
    return many


def power(effect: float, n: int) -> float:
    """Return how often n pairs exclude 0, at a mean of ``effect`` deviations.

    >>> round(power(0.5, 34), 2)
    0.81
    """
    from scipy import stats

    limit, shift = float(stats.t.ppf(0.975, n - 1)), effect * math.sqrt(n)
    below = float(stats.nct.cdf(-limit, n - 1, shift))
    return float(stats.nct.sf(limit, n - 1, shift)) + (below if below == below else 0)


def per_doubling(by_size: Mapping[int, Sequence[float]]) -> PairedDifference:
    """Return the slope over log2(size), fitted seed by seed, with its 95 % interval.

    Seeds that are not finite at every size are left out.

    >>> per_doubling({1: [0.0, 0.0], 2: [1.0, 1.5], 4: [2.0, 3.0]}).mean
    1.25
    """
    sizes = np.log2(list(by_size))
    seeds = [s for s in zip(*by_size.values(), strict=True) if np.isfinite(s).all()]
    slopes = [round(float(np.polyfit(sizes, seed, 1)[0]), 12) for seed in seeds]
    return paired(slopes or [math.nan], [0.0] * max(1, len(slopes)))


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
