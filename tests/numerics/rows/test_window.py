"""θ of a row without a witness: against every subset, and against the long ladder."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from equipoise.numerics.rows.balance import balance
from equipoise.numerics.rows.ladder import close
from equipoise.numerics.rows.window import (
    _KEYS,
    FEW,
    OPEN,
    heaviest,
    nearest,
    scratch,
)
from tests.oracles import balance as oracle

ENOUGH = 2.0**-11
# Sums of float32 in float64 round at 2⁻⁵³; θ is four times a product of two.
ROUNDING = 2.0**-48
Rows = NDArray[np.float32]


def rows(family: str, shape: tuple[int, int]) -> Rows:
    """Return float32 rows whose largest key is 1, some keys hidden at the end."""
    rng = np.random.default_rng(shape[1])
    p = oracle.rows(family, rng, shape)
    e = (p / p.max(1, keepdims=True)).astype(np.float32)
    # What ``exponentials`` cannot return, the kernel need not read.
    return np.where(e < 1e-38, np.float32(0), e)


def read(e_NK: Rows) -> NDArray[np.float64]:
    """Return the interval of every row."""
    bounds = np.full((len(e_NK), 2), OPEN)
    room = scratch(e_NK.shape[1])
    close(e_NK, e_NK.view(np.uint32), bounds, (ENOUGH, np.inf), room)
    return bounds


@pytest.mark.parametrize("family", oracle.FAMILIES)
@pytest.mark.parametrize("K", [1, 2, 3, 5, 8, 12, FEW])
def test_few_keys_are_searched_completely(family: str, K: int) -> None:
    e = rows(family, (40, K))
    low, high = read(e).T
    true = oracle.theta(e.astype(np.float64))
    assert (low <= true + ROUNDING).all() and (true <= high + ROUNDING).all()
    assert (high - low <= 4 * ENOUGH**2).all()
    proven = high < 1
    np.testing.assert_allclose(low[proven], true[proven], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("family", oracle.FAMILIES)
@pytest.mark.parametrize("K", [FEW + 1, 30, 65, 200])
def test_longer_rows_agree_with_the_ladder(family: str, K: int) -> None:
    e = rows(family, (30, K))
    low, high = read(e).T
    closed = high != OPEN
    p = e.astype(np.float64)
    found = balance(torch.from_numpy(p / p.sum(1, keepdims=True)))
    assert (low <= found.upper.numpy() + ROUNDING)[closed].all()
    assert (high >= found.lower.numpy() - ROUNDING)[closed].all()
    assert (high - low <= 4 * ENOUGH**2)[closed].all()


@pytest.mark.parametrize("scale", [0.2, 0.5, 2.0, 5.0])
def test_few_rows_of_scores_stay_open(scale: float) -> None:
    """The cost of watching rests on this: an open row costs fifty closed ones."""
    rng = np.random.default_rng(0)
    left = 0
    for K in range(3, 83, 4):
        e = np.exp(scale * rng.standard_normal((40, K)))
        left += int(
            (read((e / e.max(1, keepdims=True)).astype(np.float32))[:, 1] == OPEN).sum()
        )
    assert left <= 16  # 2 % of 800


def test_an_odd_number_of_nearly_equal_keys_has_no_half() -> None:
    rng = np.random.default_rng(1)
    e = (1 - 0.01 * rng.random((20, 25))).astype(np.float32)
    e[:, 3] = 1
    low, high = read(e).T
    assert (low == high).all() and (high < 1 - 0.5 / 25**2).all()


@pytest.mark.parametrize("most", [0, 1, 7, 20])
def test_the_heaviest_keys(most: int) -> None:
    rng = np.random.default_rng(most)
    e = rng.integers(0, 9, 20).astype(np.float32) / np.float32(8)
    e[0] = 1
    expected = np.sort(e)[::-1][:most].sum(dtype=np.float64)
    assert heaviest(e, e.size, 1.0, most) == expected


@pytest.mark.parametrize("n", [0, 1, 5, 6, 7, 12, FEW - 1])
def test_the_nearest_subset_sum(n: int) -> None:
    rng = np.random.default_rng(n)
    w, room = rng.random(n).astype(np.float32), scratch(n)
    room[_KEYS : _KEYS + n] = w
    sums = np.zeros(1)
    for x in w.astype(np.float64):
        sums = np.concatenate([sums, sums + x])
    for target in rng.uniform(-0.2, w.sum() + 0.2, 20):
        off, proven = nearest(room, (0, n), (target, w.sum() + 1, 0.0), True)
        best = np.abs(target - sums).min()
        assert abs(off) == pytest.approx(best, abs=1e-14)
        assert proven
        for signed in (True, False):
            goal = (target, w.sum() + 1, 0.05)
            soon, sure = nearest(room, (0, n), goal, signed)
            assert not sure or abs(soon) == pytest.approx(best, abs=1e-14)
            assert best - 1e-14 <= abs(soon) <= max(best, 0.05) + 1e-14
            # A sum's own distance, or no more than a bound on one.
            assert not signed or abs(target - sums - soon).min() < 1e-14
