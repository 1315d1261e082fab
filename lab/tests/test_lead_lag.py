"""A lead is found where there is one, and not where there is only growth."""

import numpy as np
import pytest

from equipoise.errors import InputError
from equipoise_lab.claims.baek_networks import growth_curve, memory
from equipoise_lab.results.lead_lag import (
    detrended,
    equalised,
    innovations,
    lagged_correlations,
    lead,
    precision_at_k,
    prewhitened,
    published_lead,
)

N = 195


def fading(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=N) * np.exp(-3 * np.arange(N) / N)


NULLS = {
    "white": lambda rng: rng.normal(size=N),
    "AR(0.9)": lambda rng: memory(rng, 0.9),
    "growth": growth_curve,
    "fading variance": fading,
}


@pytest.mark.parametrize("null", NULLS)
def test_independent_series_rarely_pass(null: str) -> None:
    rng = np.random.default_rng(1)
    pairs = [(NULLS[null](rng), NULLS[null](rng)) for _ in range(25)]
    found = [lead(x, y, permutations=99, seed=i).p for i, (x, y) in enumerate(pairs)]
    # 25 pairs at 8 %: seven or more has probability 0.2 %.
    assert sum(p <= 0.05 for p in found) <= 6


@pytest.mark.parametrize("true_lag", [20, -7])
def test_a_genuine_lead_is_found(true_lag: int) -> None:
    rng = np.random.default_rng(2)
    for _ in range(4):
        noise = rng.normal(size=N + 60)
        x = noise[30 : 30 + N]
        y = 0.6 * noise[30 - true_lag : 30 - true_lag + N] + 0.8 * rng.normal(size=N)
        t = np.arange(N)
        found = lead(0.1 * np.cumsum(x) + t / 40, y + t / 60, permutations=199)
        assert found.lag == true_lag
        assert found.p <= 0.05


def test_steps_do_what_they_say() -> None:
    t = np.linspace(-1, 1, 300)
    assert np.abs(detrended(3 + t - 2 * t**2 + t**3)).max() < 1e-10
    rng = np.random.default_rng(0)
    noise = rng.normal(size=600)
    z = np.zeros(600)
    for i in range(3, 600):
        z[i] = 0.5 * z[i - 1] + 0.2 * z[i - 2] - 0.3 * z[i - 3] + noise[i]
    assert np.corrcoef(prewhitened(z), noise[3:])[0, 1] > 0.98
    size = equalised(noise * np.exp(2 * np.linspace(-1, 1, 600) ** 2))
    early, late = np.abs(size[:200]).mean(), np.abs(size[200:400]).mean()
    assert early / late == pytest.approx(1, abs=0.25)
    assert len(innovations(noise)) == 597


def test_lagged_correlation_against_numpy() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 80))
    for lag in (-5, 0, 9):
        found = lagged_correlations(x, y, np.array([lag]))[0]
        a, b = (x[: 80 - lag], y[lag:]) if lag >= 0 else (x[-lag:], y[: 80 + lag])
        assert found == pytest.approx(np.corrcoef(a, b)[0, 1])
    flat = lagged_correlations(np.ones(80), y, np.array([0]))
    assert flat[0] == 0


def test_published_p_has_its_floor() -> None:
    rng = np.random.default_rng(0)
    found = published_lead(growth_curve(rng), growth_curve(rng), permutations=1000)
    assert found.p == pytest.approx(1 / 1001)


def test_precision_at_k_of_a_perfect_alarm_and_of_none() -> None:
    y = np.zeros(N)
    y[100:] = 5.0
    x = np.zeros(N)
    x[80:99] = np.linspace(1, 2, 19)
    found = precision_at_k(x, y)
    assert found.precision > 0.9
    assert found.lift > 1.3
    quiet = precision_at_k(np.arange(N, dtype=float), np.zeros(N))
    assert quiet.base_rate == 0 and np.isnan(quiet.lift)


def test_errors() -> None:
    good = np.random.default_rng(0).normal(size=60)
    with pytest.raises(InputError, match="at least 40"):
        lead(good[:20], good[:20])
    with pytest.raises(InputError, match="finite"):
        lead(np.where(np.arange(60) == 5, np.nan, good), good)
    with pytest.raises(InputError, match="cannot be compared"):
        lead(good, good[:50])
