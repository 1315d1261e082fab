"""Does one series of a run move before another? Tests that survive training curves.

Two independent series that both grow, drift or calm down correlate strongly somewhere.
A lead is therefore looked for in what each series does *not* know about itself:

1. a cubic trend is taken out of each;
2. an AR(3) fit is taken out of each (prewhitening);
3. each residual is divided by a smooth estimate of its own size, since two series whose
   noise merely fades together would otherwise agree;
4. the largest |r| over all lags is compared with its distribution under permutation of
   one of the two, which now is exchangeable.

The early-warning procedure of Baek v1 as released is ``published_lead``. Two
independent growth curves pass its test (``equipoise_lab.claims``): it permutes series
whose steps are not exchangeable, and maximises over 121 lags. Use ``lead``. Precision@K
and its base rate are here too.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.errors import InputError

Array = NDArray[np.float64]
SHORTEST = 40
TREND, ORDER, PERMUTATIONS, MAX_LAG = 3, 3, 1000, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """The lag at which two series agree most, and how surprising that is."""

    lag: int
    """Positive: the first series moves first, by so many steps."""
    r: float
    p: float
    """Share of permutations whose largest |r| over all lags is at least as large."""


def lead(
    x: ArrayLike,
    y: ArrayLike,
    *,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> Lead:
    """Return where and how significantly x leads y.

    Null hypothesis: after detrending, prewhitening and variance equalisation the
    innovations of x and y are independent. Checked on white noise, AR(0.9), trends,
    saturating growth and shared fading variance.
    """
    a, b = innovations(x), innovations(y)
    if len(a) != len(b):
        raise InputError(f"series of {len(a)} and {len(b)} steps cannot be compared")
    lags = _lags(len(a))
    r = lagged_correlations(a, b, lags)
    best = int(np.argmax(np.abs(r)))
    chance = correlations_when_shuffled(a, b, lags, count=permutations, seed=seed)
    top = np.abs(chance).max(-1)
    p = (1 + int((top >= abs(r[best])).sum())) / (1 + permutations)
    return Lead(lag=int(lags[best]), r=float(r[best]), p=p)


def innovations(series: ArrayLike) -> Array:
    """Return what is left of a series without trend, memory and changing size.

    Example:
        >>> t = np.arange(200.0)
        >>> noise = np.random.default_rng(0).normal(size=200)
        >>> white = innovations(5 * t + t**2 / 100 + noise)
        >>> bool(abs(np.corrcoef(white, noise[3:])[0, 1]) > 0.9)
        True
    """
    z = checked(series)
    return equalised(prewhitened(detrended(z)))


def checked(series: ArrayLike) -> Array:
    """Return the series as an array, or say why nothing can be read from it."""
    z = np.asarray(series, dtype=np.float64)
    if z.ndim != 1 or len(z) < SHORTEST:
        raise InputError(f"a lead needs a series of at least {SHORTEST} steps")
    if not np.isfinite(z).all():
        raise InputError("a lead needs finite values: cut the series where it broke")
    return z


def detrended(z: Array) -> Array:
    """Return z minus its cubic least-squares trend."""
    t = np.linspace(-1, 1, len(z))
    fit = np.polynomial.polynomial.Polynomial.fit(t, z, TREND)
    out: Array = z - fit(t)
    return out


def prewhitened(z: Array) -> Array:
    """Return the residuals of a least-squares AR(3) fit; the first 3 steps are lost."""
    past = np.stack([z[ORDER - i - 1 : len(z) - i - 1] for i in range(ORDER)], axis=1)
    now = z[ORDER:]
    weights, *_ = np.linalg.lstsq(past, now, rcond=None)
    out: Array = now - past @ weights
    return out


def equalised(z: Array) -> Array:
    """Return z over exp(cubic fit of log|z|): the same size from end to end."""
    size = np.abs(z)
    floor = 1e-6 * max(float(size.mean()), np.finfo(float).tiny)
    t = np.linspace(-1, 1, len(z))
    fit = np.polynomial.polynomial.Polynomial.fit(t, np.log(size + floor), TREND)
    out: Array = z / np.exp(fit(t))
    return out


def lagged_correlations(x: Array, y: Array, lags: NDArray[np.int_]) -> Array:
    """Return corr(x_t, y_{t+L}) over the steps both have: one row per row of x."""
    n = y.shape[-1]
    pairs = [
        (x[..., : n - L], y[L:]) if L >= 0 else (x[..., -L:], y[: n + L]) for L in lags
    ]
    return np.stack([_correlation(a, b) for a, b in pairs], axis=-1)


def correlations_when_shuffled(
    x: Array, y: Array, lags: NDArray[np.int_], *, count: int, seed: int
) -> Array:
    """Return, per random permutation of x, its correlations with y at every lag."""
    rng = np.random.default_rng(seed)
    shuffled = rng.permuted(np.broadcast_to(x, (count, len(x))), axis=1)
    return lagged_correlations(shuffled, y, lags)


def _correlation(a: Array, b: Array) -> Array:
    a, b = a - a.mean(-1, keepdims=True), b - b.mean()
    size = np.sqrt((a * a).sum(-1) * (b @ b))
    out: Array = np.divide(a @ b, size, out=np.zeros_like(size), where=size > 0)
    return out


def _lags(n: int) -> NDArray[np.int_]:
    reach = min(MAX_LAG, n // 3)
    return np.arange(-reach, reach + 1)


HORIZON, WINDOW, SIGMAS = 40, 20, 1.5


def published_lead(x: ArrayLike, y: ArrayLike, *, permutations: int = 1000) -> Lead:
    """Return the signed argmax of r over ±60 lags and its iid-permutation p."""
    a, b = (_scored(checked(z)) for z in (x, y))
    reach = min(MAX_LAG, len(a) // 3)
    lags = np.arange(-reach, reach + 1)
    r = lagged_correlations(a, b, lags)
    best = int(np.argmax(r))
    chance = correlations_when_shuffled(a, b, lags, count=permutations, seed=0)
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
