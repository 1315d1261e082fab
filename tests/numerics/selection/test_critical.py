"""The two-sample test against scipy, its power against what theory 2 reports."""

import math

import pytest
import torch
from scipy import stats

from equipoise.errors import InputError
from equipoise.numerics.selection import (
    critical_top,
    detectable_shift,
    ks_p_value,
    ks_power,
    ks_statistic,
    ks_threshold,
)
from tests.numerics.selection.specimens import normal


@pytest.mark.parametrize("size", [2, 12, 144])
@pytest.mark.parametrize("shift", [0.0, 0.4, 3.0])
def test_statistic_and_p_value_are_scipys(
    size: int, shift: float, rng: torch.Generator
) -> None:
    a, b = normal(size, rng=rng), shift + normal(size, rng=rng)
    theirs = stats.ks_2samp(a.numpy(), b.numpy(), method="exact")
    statistic = ks_statistic(a, b)
    assert statistic == pytest.approx(theirs.statistic)
    assert ks_p_value(statistic, size) == pytest.approx(theirs.pvalue, rel=1e-9)


def test_samples_of_different_sizes_have_a_statistic(rng: torch.Generator) -> None:
    a, b = normal(7, rng=rng), normal(11, rng=rng)
    theirs = stats.ks_2samp(a.numpy(), b.numpy()).statistic
    assert ks_statistic(a, b) == pytest.approx(theirs)


def test_ties_and_equal_samples() -> None:
    same = torch.tensor([1.0, 1.0, 2.0])
    assert ks_statistic(same, same) == 0.0 and ks_p_value(0.0, 3) == 1.0


def test_nan_is_not_a_verdict() -> None:
    assert math.isnan(ks_statistic(torch.tensor([math.nan]), torch.tensor([1.0])))
    assert math.isnan(ks_p_value(math.nan, 5))


@pytest.mark.parametrize("size", [8, 40, 200])
def test_power_is_what_scipy_finds_by_repeating(
    size: int, rng: torch.Generator
) -> None:
    """200 repetitions of scipy's exact test: within 4 standard errors, 0.14."""
    shift = 4 / size**0.5
    seen = 0
    for _ in range(200):
        a, b = normal(size, rng=rng), shift + normal(size, rng=rng)
        seen += stats.ks_2samp(a.numpy(), b.numpy(), method="exact").pvalue <= 0.01
    assert ks_power(shift, size, generator=rng) == pytest.approx(seen / 200, abs=0.14)


def test_the_threshold_is_the_first_step_rejected() -> None:
    for size in (10, 100):
        k = round(ks_threshold(size, 0.01) * size)
        assert ks_p_value(k / size, size) <= 0.01 < ks_p_value((k - 1) / size, size)


def test_the_detectable_shift_is_detected_four_times_in_five(
    rng: torch.Generator,
) -> None:
    shift = detectable_shift(60, generator=rng)
    assert ks_power(shift, 60, generator=rng) == pytest.approx(0.8, abs=0.06)
    assert ks_power(0.0, 60, generator=rng) <= 0.02


def test_too_few_heads_see_nothing(rng: torch.Generator) -> None:
    """Three against three: even complete separation happens by chance 1 time in 10."""
    assert ks_p_value(1.0, 3) == pytest.approx(0.1)
    assert ks_threshold(3, 0.01) == 2.0
    assert detectable_shift(3, generator=rng) == math.inf
    found = critical_top(torch.ones(1, 3), torch.zeros(1, 3), [4], generator=rng)
    assert found.top == 4 and found.detectable == math.inf


def test_the_first_size_without_a_difference_is_critical(rng: torch.Generator) -> None:
    random = normal(4, 40, rng=rng)
    true = normal(4, 40, rng=rng) + torch.tensor([9.0, 5.0, 0.0, 7.0])[:, None]
    found = critical_top(true, random, [1, 2, 4, 8], generator=rng)
    assert found.top == 4
    assert [p <= 0.01 for p in found.p_values.values()] == [True, True, False, True]
    never = critical_top(random + 9, random, [1, 2, 4, 8], generator=rng)
    assert never.top is None


def test_heads_without_a_reading_give_no_answer(rng: torch.Generator) -> None:
    table = torch.full((1, 20), math.nan)
    found = critical_top(table, torch.ones(1, 20), [4], generator=rng)
    assert found.top is None and math.isnan(found.p_values[4])


def test_broken_inputs(rng: torch.Generator) -> None:
    with pytest.raises(InputError, match="two samples"):
        ks_statistic(torch.ones(2, 2), torch.ones(2))
    with pytest.raises(InputError, match="two samples"):
        ks_statistic(torch.ones(0), torch.ones(2))
    with pytest.raises(InputError, match="sizes, heads"):
        critical_top(torch.ones(2, 5), torch.ones(2, 5), [1], generator=rng)
