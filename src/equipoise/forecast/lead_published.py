"""The early-warning procedure of Baek v1 as released; Precision@K and its base rate.

Two independent growth curves pass this test (``equipoise.claims``): it permutes series
whose steps are not exchangeable, and maximises over 121 lags. Use ``forecast.lead``.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equipoise.forecast.lead import (
    MAX_LAG,
    Array,
    Lead,
    checked,
    correlations_when_shuffled,
    lagged_correlations,
)

HORIZON, WINDOW, SIGMAS = 40, 20, 1.5


def published_lead(
    x: ArrayLike, y: ArrayLike, *, permutations: int = 1000, seed: int = 0
) -> Lead:
    """Return the signed argmax of r over ±60 lags and its iid-permutation p."""
    a, b = (_scored(checked(z)) for z in (x, y))
    reach = min(MAX_LAG, len(a) // 3)
    lags = np.arange(-reach, reach + 1)
    r = lagged_correlations(a, b, lags)
    best = int(np.argmax(r))
    chance = correlations_when_shuffled(a, b, lags, count=permutations, seed=seed)
    p = (1 + int((chance.max(-1) >= r[best]).sum())) / (1 + permutations)
    return Lead(lag=int(lags[best]), r=float(r[best]), p=p)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarms:
    """How often an alarm was followed by an event, against how often anything was."""

    precision: float
    base_rate: float
    """Share of eligible steps (threshold defined, full horizon ahead) with an event."""
    published: float
    """Precision over all steps, ineligible ones included, as the paper counts."""

    @property
    def lift(self) -> float:
        """Return precision ÷ base rate: 1 means the alarm knows nothing."""
        return self.precision / self.base_rate if self.base_rate else float("nan")


def precision_at_k(x: ArrayLike, y: ArrayLike) -> Alarms:
    """Return Precision@K of x's excursions for jumps of y within 40 steps.

    Event at i: max y over i … i+39 exceeds both y_i and a rolling mean + 1.5 σ.
    Alarm: the K = max(10, n // 10) largest x - rolling mean.
    """
    a, b = checked(x), checked(y)
    n = len(a)
    event = _events(b)
    score = a - _rolling(a, np.mean)
    score[: WINDOW - 1] = -np.inf  # no rolling mean yet
    eligible = np.arange(WINDOW - 1, n - HORIZON + 1)
    K = max(10, n // 10)
    top = np.argsort(score)[::-1][:K]
    fair = eligible[np.argsort(score[eligible])[::-1][: min(K, len(eligible))]]
    return Alarms(
        precision=float(event[fair].mean()),
        base_rate=float(event[eligible].mean()),
        published=float(event[top].mean()),
    )


def _events(y: Array) -> Array:
    threshold = _rolling(y, np.mean) + SIGMAS * _rolling(y, np.std)
    threshold[: WINDOW - 1] = np.inf
    ahead = np.array([y[i : i + HORIZON].max() for i in range(len(y))])
    out: Array = (ahead > np.maximum(y, threshold)).astype(float)
    return out


def _rolling(z: Array, statistic: object) -> Array:
    assert callable(statistic)
    starts = [max(0, i - WINDOW + 1) for i in range(len(z))]
    return np.array([statistic(z[s : i + 1]) for i, s in enumerate(starts)])


def _scored(z: Array) -> Array:
    spread = z.std()
    out: Array = (z - z.mean()) / (spread if spread > 0 else 1.0)
    return out
