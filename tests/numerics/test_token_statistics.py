"""One visit to memory, against torch in float64."""

import pytest
import torch
from torch import Tensor

from equipoise.numerics.token_statistics import (
    adam_norms,
    kurtosis,
    token_cosine,
    token_sizes,
)
from tests.conftest import FLOATS


def sizes(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    return wide.square().mean(-1).sqrt(), centred.square().mean(-1).sqrt()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5,), (3, 1), (2, 7, 33), (0, 4)])
def test_sizes_of_tokens(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 2).to(dtype)
    found = token_sizes(x.requires_grad_())
    for got, true in zip(found, sizes(x.detach()), strict=True):
        assert not got.requires_grad
        torch.testing.assert_close(got.double(), true, rtol=1e-6, atol=1e-6)


def test_sizes_where_squares_leave_the_format() -> None:
    x = torch.tensor([[1e30, -1e30], [1e-30, -1e-30], [torch.nan, 0], [torch.inf, 0]])
    found = token_sizes(x)
    torch.testing.assert_close(found.around_mean[:2], torch.tensor([1e30, 1e-30]))
    assert found.around_mean[2:].isnan().all() and found.around_zero[2].isnan()
    assert found.around_zero[3].isinf()


def test_strides_make_no_difference() -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for a, b in zip(token_sizes(x.T), token_sizes(x.T.contiguous()), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_length_of_adams_step(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(2)
    m = torch.randn(7, 9, generator=rng).to(dtype)
    v = torch.rand(7, 9, generator=rng).to(dtype)
    true = (m.double() / (v.double().sqrt() + 0.01)).norm()
    rough = 1e-2 if dtype == torch.bfloat16 else 1e-5
    (found,) = adam_norms([m], [v], floors=[0.01], rates=[2.0]) / 2
    torch.testing.assert_close(found.double(), true, rtol=rough, atol=0)
    still = torch.zeros(3)
    ones = torch.ones(2)
    both = [still, ones]
    norms = adam_norms(both, both, floors=[0.0, 1.0], rates=[1.0, 3.0])
    assert norms[0].isnan() and abs(norms[1] - 3 * 2**-0.5) < 1e-6
    # One v for a row, as factored optimisers keep it: no memory beyond it is read.
    (shared,) = adam_norms([m], [v[:, :1].contiguous()], floors=[0.01], rates=[1.0])
    true = (m.double() / (v[:, :1].double().sqrt() + 0.01)).norm()
    torch.testing.assert_close(shared.double(), true, rtol=rough, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kurtosis(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(9, 40, generator=rng, dtype=torch.float64).exp().to(dtype)
    square = (x.double() - x.double().mean()).square()
    true = square.square().mean() / square.mean().square()
    torch.testing.assert_close(kurtosis(x).double(), true, rtol=1e-6, atol=0)
    assert kurtosis(torch.ones(4, dtype=dtype)).isnan()
    assert kurtosis(torch.tensor([1.0, torch.nan], dtype=dtype)).isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_token_cosine_is_the_mean_over_pairs(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(4)
    x = torch.randn(3, 7, 5, generator=rng, dtype=torch.float64).to(dtype)
    x[1, 2] = 0.0  # no direction: cosine 0 with all
    for row, cosine in zip(x.double(), token_cosine(x), strict=True):
        pairs = [
            torch.cosine_similarity(row[i], row[j], dim=0).item()
            for i in range(7)
            for j in range(7)
            if i != j
        ]
        exact = 1e-14 if dtype == torch.float64 else 1e-7
        assert cosine.item() == pytest.approx(sum(pairs) / len(pairs), abs=exact)


def test_a_broken_token_breaks_its_sequence_only() -> None:
    x = torch.ones(2, 3, 4)
    x[1, 0, 2] = torch.nan
    assert token_cosine(x).isnan().tolist() == [False, True]
