"""Norms of matrices whose rows lie apart, against the singular values of the whole."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.spectra.sharded_norm import (
    SharedNorm,
    first_basis,
    leading_basis,
    share_of_image,
    shared_norm,
)


def drawn(rows: int, width: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=rng, dtype=torch.float64) / width**0.5


def exchanged(matrix: Tensor, basis: Tensor, places: int = 2) -> SharedNorm:
    """One exchange; what travels is float32."""
    shards = matrix.tensor_split(places)
    return shared_norm(basis, [share_of_image(s, basis).float() for s in shards])


def truth(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix.double())[0])


@given(
    st.integers(1, 90),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_a_narrow_matrix_is_known_at_once(
    width: int, rows: int, places: int, seed: int
) -> None:
    matrix = drawn(rows, width, seed)
    found = exchanged(matrix, first_basis(width), places)
    assert found.error == 0
    # Float32 shares: a few roundings of the sum's size.
    assert found.value == pytest.approx(truth(matrix), rel=2e-6)


@given(st.integers(91, 150), st.integers(1, 4), st.integers(0, 99))
def test_any_directions_give_a_lower_bound(width: int, places: int, seed: int) -> None:
    matrix = drawn(50, width, seed)
    found = exchanged(matrix, first_basis(width), places)
    assert found.value <= truth(matrix) * (1 + 1e-6)
    singular = torch.linalg.svdvals(matrix)
    nearest = (singular - found.value).abs().min()
    # To first order; the value is never further than the Ritz pair's own.
    assert nearest <= found.value * found.error * (1 + found.error) + 1e-6


@pytest.mark.parametrize("shape", [(256, 256), (64, 256), (512, 128)])
@pytest.mark.parametrize(("moved", "tolerance"), [(1e-3, 5e-6), (1e-2, 3e-4)])
def test_a_norm_is_followed_by_one_exchange_a_sample(
    shape: tuple[int, int], moved: float, tolerance: float
) -> None:
    """Weights that move by 0.1 % a sample, and by 1 %, in random directions."""
    matrix = drawn(*shape)
    basis = leading_basis(matrix)
    assert basis.shape == (shape[1], 8192 // shape[1])
    for seed in range(1, 16):
        matrix = matrix + moved * drawn(*shape, seed=seed)
        found = exchanged(matrix, basis)
        assert 1 - tolerance <= found.value / truth(matrix) <= 1 + 1e-6
        assert found.error < moved
        basis = found.basis_DK
        torch.testing.assert_close(
            basis.mT @ basis, torch.eye(basis.shape[1], dtype=torch.float64)
        )


def test_a_norm_is_found_without_a_start() -> None:
    matrix = drawn(128, 128)
    basis = first_basis(128)
    found = exchanged(matrix, basis)
    first = found.error
    for _ in range(40):
        found = exchanged(matrix, found.basis_DK)
    assert first > 0.1 and found.error < 1e-3
    assert found.value == pytest.approx(truth(matrix), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 96])
def test_dtypes(dtype: torch.dtype, width: int) -> None:
    matrix = drawn(48, width).to(dtype)
    found = exchanged(matrix, leading_basis(matrix))
    assert found.value == pytest.approx(truth(matrix), rel=1e-5)


@pytest.mark.parametrize("width", [8, 96])
def test_a_zero_matrix_has_norm_zero_and_a_broken_one_nan(width: int) -> None:
    zero = torch.zeros(6, width)
    found = exchanged(zero, leading_basis(zero))
    assert (found.value, found.error) == (0.0, 0.0)
    assert exchanged(zero + 1, found.basis_DK).value > 0
    for bad in (math.nan, math.inf):
        matrix = drawn(6, width)
        matrix[2, 3] = bad
        found = exchanged(matrix, leading_basis(matrix))
        assert math.isnan(found.value)
        assert found.basis_DK.isfinite().all()


def test_places_that_disagree_about_the_directions_are_found_out() -> None:
    matrix = drawn(96, 96)
    mine, theirs = leading_basis(matrix), first_basis(96)
    one, two = matrix.tensor_split(2)
    shares = [share_of_image(one, mine), share_of_image(two, theirs)]
    assert math.isnan(shared_norm(mine, shares).value)


def test_shares_must_fit() -> None:
    with pytest.raises(InputError, match="do not fit"):
        shared_norm(first_basis(8), [torch.ones(8, 3)])
    with pytest.raises(InputError, match="do not fit"):
        shared_norm(first_basis(8), [])
