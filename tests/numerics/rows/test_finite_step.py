"""The finite-step form of θ, against every vertex and against its own limits."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.rows.balance import balance
from equipoise.numerics.rows.finite_step import finite_step
from tests.oracles.finite_step import largest_change

seeds = st.integers(0, 2**32 - 1)
# The oracle's softmax and sums: K terms of 1e-16 each, absolute.
ROUNDING = 1e-14


def rows(seed: int, *shape: int, size: float) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return size * torch.randn(*shape, generator=rng, dtype=torch.float64)


@given(seeds, st.integers(1, 9), st.floats(0.1, 12), st.floats(0.01, 12))
def test_the_interval_holds_the_best_vertex_and_closes(
    seed: int, keys: int, size: float, radius: float
) -> None:
    z_NK = rows(seed, 3, keys, size=size)
    found = finite_step(z_NK.softmax(-1), radius=radius)
    truth_N = largest_change(z_NK, radius)
    assert (found.lower <= truth_N + ROUNDING).all()
    assert (truth_N <= found.upper + ROUNDING).all()
    assert (found.upper - found.lower <= 1e-9 * truth_N + ROUNDING).all()


@given(seeds, st.floats(0.1, 5), st.floats(0.01, 8))
def test_no_step_within_the_radius_goes_further(
    seed: int, size: float, radius: float
) -> None:
    z_K = rows(seed, 12, size=size)
    step_NK = radius * (2 * torch.rand(200, 12, dtype=torch.float64) - 1)
    moved_N = ((z_K + step_NK).softmax(-1) - z_K.softmax(-1)).abs().sum(-1)
    found = finite_step(z_K.softmax(-1), radius=radius)
    assert moved_N.max() <= found.upper + ROUNDING


@given(seeds, st.floats(0.1, 3))
def test_a_small_step_is_theta(seed: int, size: float) -> None:
    p_NK = rows(seed, 4, 8, size=size).softmax(-1)
    found = finite_step(p_NK, radius=1e-6)
    torch.testing.assert_close(
        found.lower / 1e-6, balance(p_NK).lower, rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize("radius", [0.3, 2.0, 8.0])
def test_known_points(radius: float) -> None:
    """(m*, 1 − m*) attains 2 tanh(r/2); one key never moves; (½, ½): tanh r."""
    best = 1 / (1 + math.exp(radius))
    p_NK = torch.tensor([[best, 1 - best], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    found = finite_step(p_NK, radius=radius)
    expected = [2 * math.tanh(radius / 2), 0.0, math.tanh(radius)]
    for bound in (found.lower, found.upper):
        assert bound.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_beyond_what_float64_can_tell_the_interval_stays_open() -> None:
    """m* = 2e-9: θ of the row and its companion is 1 to the last bit."""
    found = finite_step(torch.tensor([[1.0, 0.0]]), radius=20.0)
    assert found.lower[0] == 0 < found.upper[0] <= 2


def test_a_saturated_row_moves_though_theta_is_nothing() -> None:
    p_K = torch.tensor([1 - 1e-4, 1e-4], dtype=torch.float64)
    assert float(balance(p_K).upper) < 5e-4
    assert float(finite_step(p_K, radius=5.0).lower) > 1.3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_rows_are_read_as_they_are(dtype: torch.dtype) -> None:
    p_NK = rows(0, 5, 6, size=2.0).softmax(-1).to(dtype)
    found = finite_step(p_NK, radius=1.5)
    wide = p_NK.double() / p_NK.double().sum(-1, keepdim=True)
    truth_N = largest_change(wide.log(), 1.5)
    assert found.lower.dtype == torch.float64
    torch.testing.assert_close(found.lower, truth_N, rtol=1e-9, atol=1e-12)


def test_long_rows_and_leading_axes() -> None:
    p_xK = rows(1, 2, 3, 700, size=3.0).softmax(-1)
    found = finite_step(p_xK, radius=1.0)
    assert found.upper.shape == (2, 3)
    assert (found.upper - found.lower).max() < 1e-6
    assert (found.upper <= 2 * math.tanh(0.5)).all()


def test_what_is_not_a_row_reads_nan_and_only_that() -> None:
    p_NK = torch.full((4, 3), 1 / 3, dtype=torch.float64)
    p_NK[0, 1], p_NK[1], p_NK[2, 0] = math.nan, 0.1, -0.2
    found = finite_step(p_NK, radius=1.0)
    for bound in (found.lower, found.upper):
        assert bound.isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize("radius", [0.0, -1.0, math.inf, math.nan])
def test_a_radius_that_is_none_is_refused(radius: float) -> None:
    with pytest.raises(InputError, match="radius must be positive"):
        finite_step(torch.tensor([0.5, 0.5]), radius=radius)


def test_a_step_of_any_size_stays_finite() -> None:
    found = finite_step(torch.tensor([[0.9, 0.1], [0.5, 0.5]]), radius=900.0)
    assert found.upper.tolist() == pytest.approx([1.8, 1.0])
