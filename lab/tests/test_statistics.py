"""Error bars are the textbook's, and what cannot be said is not said."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scipy import stats

from equipoise.errors import InputError
from equipoise_lab.results.statistics import holm, paired, seeds_to_decide, summary

values = st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=6)


@given(values, values)
def test_pairs_agree_with_scipy(a: list[float], b: list[float]) -> None:
    n = min(len(a), len(b))
    a, b = a[:n], b[:n]
    found = paired(a, b)
    differences = [x - y for x, y in zip(a, b, strict=True)]
    if max(differences) - min(differences) < 1e-6:
        return  # SciPy warns of cancellation here and returns what it can
    expected = stats.ttest_rel(a, b)
    interval = expected.confidence_interval()
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_one_seed_has_no_error_bar() -> None:
    assert math.isnan(summary([1.0]).sd) and math.isnan(paired([1.0], [2.0]).p)


def test_a_diverged_arm_is_still_a_result() -> None:
    assert summary([1.0, math.inf]).mean == math.inf
    assert math.isnan(summary([1.0, math.nan]).mean)
    assert math.isnan(paired([math.inf, 1.0], [1.0, 1.0]).p)
    assert str(summary([1.0, math.inf])) == "inf"
    assert str(paired([math.inf, 1.0], [1.0, 1.0])) == "+inf"


def test_no_spread_says_nothing_about_chance() -> None:
    found = paired([2.0, 3.0], [1.0, 2.0])
    assert (found.mean, found.low, found.high) == (1, 1, 1) and math.isnan(found.p)
    assert str(found) == "+1 in every pair"
    assert str(paired([2.0], [1.0])) == "+1"


def test_what_cannot_be_compared() -> None:
    with pytest.raises(InputError, match="no value"):
        summary([])
    with pytest.raises(InputError, match="2 runs cannot be paired with 1"):
        paired([1.0, 2.0], [1.0])


def test_rounding_before_pairing_is_no_evidence() -> None:
    """Losses that were rounded to 0.001 cannot differ by less, however steadily."""
    ours, theirs = [3.011, 3.022, 3.034], [3.010, 3.021, 3.032]
    assert paired(ours, theirs).p < 0.1
    found = paired(ours, theirs, digits=4)
    plain = paired(ours, theirs)
    assert found.low == pytest.approx(plain.low - 0.001)
    assert found.high == pytest.approx(plain.high + 0.001)
    assert found.low < 0 < found.high and found.p > 0.3
    assert paired(ours, ours, digits=4).p == 1.0


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8))
def test_holm_is_the_closed_form(p_values: list[float]) -> None:
    """By hand: each hypothesis at its rank among those not yet rejected."""
    n = len(p_values)
    order = sorted(range(n), key=p_values.__getitem__)
    expected = [0.0] * n
    for rank, i in enumerate(order):
        scaled = [min(1.0, (n - r) * p_values[j]) for r, j in enumerate(order)]
        expected[i] = max(scaled[: rank + 1])
    assert holm(p_values) == pytest.approx(expected)
    with_gap = holm([*p_values, math.nan])
    assert with_gap[:n] == pytest.approx(expected) and math.isnan(with_gap[n])


def test_how_many_seeds_would_decide_four_times_in_five() -> None:
    """That number of pairs excludes 0 in 80 % of simulated trials."""
    undecided = paired([0.0, 2.0, 1.0, 3.0], [0.0, 0.0, 1.5, 1.5])
    n = seeds_to_decide(undecided)
    assert n is not None
    sd = math.sqrt(4) * (undecided.high - undecided.mean) / stats.t.ppf(0.975, 3)
    rng = np.random.default_rng(0)
    for seeds, enough in ((n - 2, False), (n + 1, True)):
        drawn = rng.normal(undecided.mean, sd, (40_000, seeds))
        error = drawn.std(1, ddof=1) / math.sqrt(seeds)
        half = stats.t.ppf(0.975, seeds - 1) * error
        share = float((np.abs(drawn.mean(1)) > half).mean())
        assert (share >= 0.8) is enough and abs(share - 0.8) < 0.06
    assert seeds_to_decide(paired([2.0, 3.1, 4.0], [1.0, 2.0, 3.0])) is None
    assert seeds_to_decide(paired([1.0, -1.0], [0.0, 0.0])) is None
