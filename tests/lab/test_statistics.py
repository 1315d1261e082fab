"""Error bars are the textbook's, and what cannot be said is not said."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given
from scipy import stats

from equipoise.errors import InputError
from equipoise.lab.results.statistics import paired, summary

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
