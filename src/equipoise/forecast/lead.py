"""Does one series of a run move before another? Tests that survive training curves.

Two independent series that both grow, drift or calm down correlate strongly somewhere.
A lead is therefore looked for in what each series does *not* know about itself:

1. a cubic trend is taken out of each;
2. an AR(3) fit is taken out of each (prewhitening);
3. each residual is divided by a smooth estimate of its own size, since two series whose
   noise merely fades together would otherwise agree;
4. the largest |r| over all lags is compared with its distribution under permutation of
   one of the two, which now is exchangeable.

The procedure of Baek v1 (no such care) stands beside it in ``forecast.lead_published``.
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
    max_lag: int = MAX_LAG,
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
    lags = _lags(len(a), max_lag)
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


def _lags(n: int, max_lag: int) -> NDArray[np.int_]:
    reach = min(max_lag, n // 3)
    return np.arange(-reach, reach + 1)
