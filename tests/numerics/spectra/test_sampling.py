"""Extreme eigenvalues and traces of operators given only by their products."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from equipoise.errors import InputError
from equipoise.numerics.spectra.estimate import Search, Status
from equipoise.numerics.spectra.extremes import extremes
from equipoise.numerics.spectra.trace import hutch_plus_plus, hutchinson

seeds = st.integers(0, 2**32 - 1)


def symmetric(seed: int, N: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    A = torch.randn(N, N, generator=rng, dtype=torch.float64)
    return A + A.mT, torch.randn(N, generator=rng, dtype=torch.float64)


@settings(max_examples=40)
@given(seeds, st.integers(1, 90))
def test_extremes_hold_the_whole_spectrum(seed: int, N: int) -> None:
    A, start = symmetric(seed, N)
    values = torch.linalg.eigvalsh(A)
    low, high = extremes(lambda x: A @ x, start)
    radius = float(values.abs().max())
    assert low.lower <= float(values[0]) <= low.value + 1e-10 * radius
    assert high.value - 1e-10 * radius <= float(values[-1]) <= high.upper
    assert abs(high.value - float(values[-1])) <= 1e-4 * radius


def test_extreme_eigenvalues_carry_their_status() -> None:
    A, start = symmetric(0, 80)
    assert extremes(lambda x: A @ x, start).largest.status is Status.PROBABLE
    few = extremes(lambda x: A @ x, start, search=Search(at_most=5)).largest
    assert few.status is Status.STEP_LIMIT
    assert few.value <= float(torch.linalg.eigvalsh(A)[-1]) <= few.upper
    warm = extremes(lambda x: A @ x, start, warm=True)
    assert warm.smallest.status is Status.RESIDUAL
    assert warm.smallest.lower == -math.inf
    one = extremes(lambda x: 2 * x, start).largest
    assert (one.status, one.steps) == (Status.CLOSED, 1)
    broken = extremes(lambda x: x * math.nan, start)
    assert broken.largest.status is Status.BROKEN
    with pytest.raises(InputError, match="start vector"):
        extremes(lambda x: x, torch.ones(2, 2))


@pytest.mark.parametrize("estimator", [hutchinson, hutch_plus_plus])
def test_traces_are_unbiased_with_a_correct_standard_error(estimator) -> None:  # type: ignore[no-untyped-def]
    A, _ = symmetric(1, 40)
    truth = float(A.trace())
    rng = torch.Generator().manual_seed(0)
    found = [
        estimator(lambda x: A @ x, 40, probes=60, generator=rng, dtype=torch.float64)
        for _ in range(100)
    ]
    scores = torch.tensor([(e.value - truth) / e.residual for e in found])
    assert abs(float(scores.mean())) < 0.4  # 4σ of a mean of 100
    assert 0.7 < float(scores.std()) < 1.4
    assert all(e.status is Status.SAMPLED and not e.certified for e in found)


def test_hutch_plus_plus_beats_hutchinson_on_a_decaying_spectrum() -> None:
    values = torch.arange(1, 201, dtype=torch.float64) ** -2.0
    Q = torch.linalg.qr(symmetric(2, 200)[0]).Q
    A = (Q * values) @ Q.mT

    def error(estimator) -> float:  # type: ignore[no-untyped-def]
        rng = torch.Generator().manual_seed(0)
        options = {"probes": 30, "generator": rng, "dtype": torch.float64}
        found = [estimator(lambda x: A @ x, 200, **options) for _ in range(20)]
        return max(abs(e.value - float(values.sum())) for e in found)

    assert error(hutch_plus_plus) < 0.2 * error(hutchinson)


def test_diagonal_operators_are_read_exactly() -> None:
    d = torch.arange(7.0)
    rng = torch.Generator().manual_seed(0)
    found = hutchinson(lambda x: d * x, 7, probes=3, generator=rng)
    assert (found.value, found.residual) == (21.0, 0.0)
    zero = hutchinson(lambda x: 0 * x, 7, probes=3, generator=rng)
    assert (zero.value, zero.error) == (0.0, math.inf)


def test_what_cannot_be_sampled() -> None:
    rng = torch.Generator().manual_seed(0)
    with pytest.raises(InputError, match="standard error"):
        hutchinson(lambda x: x, 3, probes=1, generator=rng)
    with pytest.raises(InputError, match="Hutch"):
        hutch_plus_plus(lambda x: x, 3, probes=5, generator=rng)
    broken = hutchinson(lambda x: x / 0, 3, probes=2, generator=rng)
    assert broken.status is Status.BROKEN
