"""Per-head product norms against a dense float64 SVD of the formed product."""

import pytest
import torch
from torch import Tensor

from equipoise.numerics.spectra.tracking import head_product_norms
from tests.conftest import FLOATS


def dense(a_HRD: Tensor, b_HRD: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(a_HRD.double().mT @ b_HRD.double(), 2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("H", "R", "D"), [(1, 1, 3), (3, 8, 8), (4, 16, 64), (2, 64, 48)]
)
def test_matches_the_formed_product(
    dtype: torch.dtype, H: int, R: int, D: int, rng: torch.Generator
) -> None:
    a, b = (torch.randn(H, R, D, generator=rng).to(dtype) for _ in range(2))
    value = head_product_norms(a, b).value_H.double()
    truth = dense(a, b)
    assert (value <= truth * (1 + 1e-5)).all()  # a Rayleigh quotient, rounded
    # Two leading values within 1 % leave 0.99^(2·192) of the smaller: 2 % of 1 %.
    torch.testing.assert_close(value, truth, rtol=3e-4, atol=0)


def test_a_warm_start_follows_small_changes(rng: torch.Generator) -> None:
    a, b = torch.randn(4, 16, 64, generator=rng), torch.randn(4, 16, 64, generator=rng)
    start = head_product_norms(a, b).start_HR
    a = a + 1e-3 * torch.randn(a.shape, generator=rng)
    warm = head_product_norms(a, b, start=start).value_H
    torch.testing.assert_close(warm.double(), dense(a, b), rtol=3e-4, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e15])
def test_scales_without_overflow(scale: float, rng: torch.Generator) -> None:
    a, b = torch.randn(2, 4, 8, generator=rng), torch.randn(2, 4, 8, generator=rng)
    expected = head_product_norms(a, b).value_H * scale
    torch.testing.assert_close(
        head_product_norms(a * scale, b).value_H, expected, rtol=1e-4, atol=0
    )


def test_zero_reads_zero_and_nan_reads_nan() -> None:
    a = torch.ones(2, 3, 4)
    a[0] = 0
    broken = torch.ones(2, 3, 4)
    broken[1, 0, 0] = float("nan")
    assert head_product_norms(a, torch.ones(2, 3, 4)).value_H[0] == 0
    value = head_product_norms(broken, torch.ones(2, 3, 4)).value_H
    assert value[0] > 0 and value[1].isnan()
