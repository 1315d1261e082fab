"""Quantiles of rows, against torch's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.numerics.token_statistics import nan_quantiles

AT = [0.0, 0.05, 0.5, 1.0]


def truth(x: torch.Tensor) -> torch.Tensor:
    at = torch.tensor(AT, dtype=torch.float64)
    return torch.nanquantile(x.double(), at, dim=-1)


@given(
    rows=st.integers(1, 4),
    values=st.integers(1, 60),
    hidden=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
def test_as_torch_has_them(rows: int, values: int, hidden: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, values, generator=rng)
    x[torch.rand(rows, values, generator=rng) < hidden] = torch.nan
    found = nan_quantiles(x, AT)
    # Float32 in and out: one rounding of the values' size, which is below 8.
    torch.testing.assert_close(
        found.double(), truth(x), atol=1e-6, rtol=0, equal_nan=True
    )
    assert found.dtype == torch.float32 and found.shape == (len(AT), rows)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_dtypes_and_strides(dtype: torch.dtype) -> None:
    x = torch.arange(42.0).reshape(7, 3, 2).to(dtype).transpose(0, 2)
    found = nan_quantiles(x, AT)
    torch.testing.assert_close(found.double(), truth(x), atol=2e-6, rtol=1e-6)
    assert found.dtype == torch.promote_types(dtype, torch.float32)


def test_known_points() -> None:
    x = torch.tensor([[3.0, torch.nan, 1.0], [torch.nan] * 3, [torch.inf, 0.0, 1.0]])
    low, *_, high = nan_quantiles(x, [0.0, 1.0])
    torch.testing.assert_close(low, torch.tensor([1.0, torch.nan, 0.0]), equal_nan=True)
    torch.testing.assert_close(
        high, torch.tensor([3.0, torch.nan, torch.inf]), equal_nan=True
    )


def test_the_tensor_stays_resizable() -> None:
    """FSDP frees what we looked at by resizing it."""
    x = torch.zeros(2, 3)
    nan_quantiles(x, AT)
    assert x.untyped_storage().resizable()
