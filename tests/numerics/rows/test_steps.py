"""Each step alone: what it returns is attained, what it proves is true."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from equipoise.numerics.rows.steps import (
    _subset_sums,
    best_swap,
    counted,
    largest_first,
    nearest_sums,
    partition,
    searched,
    swapped,
)
from tests.oracles import balance as oracle

Row = NDArray[np.float64]
families = st.sampled_from(sorted(oracle.FAMILIES))
seeds = st.integers(0, 2**32 - 1)
small = st.integers(2, 10)
ROUNDING = 1e-14


def descending(family: str, seed: int, K: int) -> Row:
    row = oracle.rows(family, np.random.default_rng(seed), (1, K))[0]
    return np.sort(row[row > 0])[::-1].copy()


def all_gaps(v: Row) -> Row:
    signs = np.array(list(itertools.product([0, 1], repeat=v.size)))
    return v.sum() / 2 - signs @ v


def gap_of(v: Row, side: NDArray[np.uint8]) -> float:
    return float(v.sum() / 2 - v @ side)


@settings(max_examples=60)
@given(families, seeds, st.integers(1, 60))
def test_gaps_are_those_of_the_sides(family: str, seed: int, K: int) -> None:
    v = descending(family, seed, K)
    half, side = v.sum() / 2, np.empty(v.size, np.uint8)
    gap = largest_first(v, 0, half, side)
    assert gap == pytest.approx(gap_of(v, side), abs=ROUNDING)
    better = swapped(v, gap, side, 0.0)
    assert better == pytest.approx(gap_of(v, side), abs=ROUNDING)
    assert abs(better) <= abs(gap)


@settings(max_examples=60)
@given(families, seeds, small)
def test_the_best_swap_is_the_best(family: str, seed: int, K: int) -> None:
    v = descending(family, seed, K)
    side = np.random.default_rng(seed).integers(0, 2, v.size).astype(np.uint8)
    gap = gap_of(v, side)
    leaving = [0.0, *v[side == 1]]
    entering = [0.0, *v[side == 0]]
    best = min(abs(gap - j + i) for i in leaving for j in entering)
    assert abs(best_swap(v, gap, side)) == pytest.approx(best, abs=ROUNDING)
    assert abs(gap_of(v, side)) == pytest.approx(best, abs=ROUNDING)


@settings(max_examples=60)
@given(families, seeds, small)
def test_what_is_proven_is_true(family: str, seed: int, K: int) -> None:
    v = descending(family, seed, K)
    half, truth = v.sum() / 2, np.abs(all_gaps(v)).min()
    side = np.zeros(v.size, np.uint8)
    gap, proven = counted(v, half, half, side, 0.0)
    assert proven <= truth + ROUNDING
    assert gap == pytest.approx(gap_of(v, side), abs=ROUNDING)
    for m in range(1, v.size + 1):
        gap, proven = searched(v, half, half, side, 0.0, m)
        assert proven <= truth + ROUNDING
        assert abs(gap) >= truth - ROUNDING
        assert gap == pytest.approx(gap_of(v, side), abs=ROUNDING)
    assert abs(gap) == pytest.approx(truth, abs=ROUNDING)  # of all keys


@given(families, seeds, small, st.floats(-0.2, 1.2))
def test_nearest_sums_bracket_the_target(
    family: str, seed: int, K: int, target: float
) -> None:
    rng = np.random.default_rng(seed)
    w = descending(family, seed, K) * rng.choice([-1.0, 1.0])
    signs = np.array(list(itertools.product([0, 1], repeat=w.size)))
    sums = signs @ w
    halves = _subset_sums(w, 0), _subset_sums(w, 1)
    below, a, b, above, c, d = nearest_sums(*halves, target)
    for found, one, two, truth in (
        (below, a, b, sums[sums <= target].max(initial=-np.inf)),
        (above, c, d, sums[sums > target].min(initial=np.inf)),
    ):
        # A sum within rounding of the target may be counted on either side.
        assert (
            found == pytest.approx(truth, abs=ROUNDING)
            or np.isclose([found, truth], target, rtol=0, atol=ROUNDING).any()
        )
        if np.isfinite(found):
            bits = [(two if k % 2 else one) >> (k // 2) & 1 for k in range(w.size)]
            assert float(bits @ w) == pytest.approx(found, abs=ROUNDING)


@pytest.mark.parametrize("n", [31, 41])
def test_complete_within_the_work_and_honest_beyond(n: int) -> None:
    """All subsets of 31 keys are 2¹⁷ sums; those of 41 would be 32 times as many."""
    v = np.sort(1 + np.random.default_rng(n).random(n))[::-1].copy()
    half, side = v.sum() / 2, np.zeros(n, np.uint8)
    gap, proven = partition(v, half, side, (0.0, 20.0))
    assert gap == pytest.approx(gap_of(v, side), abs=n * 2.0**-46)
    assert proven <= abs(gap) + n * 2.0**-46
    assert (abs(gap) - proven < n * 2.0**-46) == (n == 31)


@given(seeds, st.integers(1, 3), st.integers(4, 9))
@settings(max_examples=60)
def test_peaks_above_a_plateau_are_counted_too(
    seed: int, peaks: int, flat: int
) -> None:
    """A sink over near-equal keys: the proof holds, and it is exact in the gaps."""
    rng = np.random.default_rng(seed)
    plateau = 1 + 1e-3 * rng.random(flat)
    tops = 2.1 ** (1 + np.arange(peaks)) * (1 + 0.1 * rng.random(peaks))
    v = np.sort(np.concatenate([tops, plateau]))[::-1].copy()
    v /= v.sum()
    truth = np.abs(all_gaps(v)).min()
    half, side = v.sum() / 2, np.zeros(v.size, np.uint8)
    gap, proven = counted(v, half, half, side, 0.0)
    assert proven <= truth + ROUNDING
    if truth > 0.1 * v[-1]:  # ½ lies well outside what a count can reach
        assert proven == pytest.approx(truth, rel=1e-9)
        assert abs(gap) == pytest.approx(truth, rel=1e-9)
