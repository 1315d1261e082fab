"""The gains of the normalisers against autograd of torch's own layers."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.norms import (
    block_norm,
    layer_norm_eigenvalues,
    layer_norm_gain,
    layer_norm_scale,
    magnitude_reset,
    magnitude_reset_rms,
    norm_lipschitz,
    rms,
    rms_norm_eigenvalues,
    rms_norm_gain,
    rms_norm_scale,
)
from tests.conftest import FLOATS, error_budget
from tests.oracles import norms as oracle

seeds = st.integers(0, 2**32 - 1)
widths = st.integers(1, 24)
floors = st.sampled_from([1e-12, 1e-5, 1e-1, 10.0])


def token(seed: int, D: int, *, offset: float = 0.0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(D, generator=rng, dtype=torch.float64) + offset


@given(seeds, widths, floors, st.sampled_from([0.0, 3.0]))
def test_layer_norm_gain_brackets_autograd(
    seed: int, D: int, eps: float, offset: float
) -> None:
    x, weight = token(seed, D, offset=offset), token(seed + 1, D)
    truth = oracle.spectral(oracle.layer_norm_jacobian(x, weight, eps))
    low, high = layer_norm_gain(x, weight, eps=eps)
    # Autograd subtracts two nearly equal terms of size 1/σ along x.
    slack = 64 * torch.finfo(x.dtype).eps * float(weight.abs().max()) / eps**0.5
    assert low - slack <= truth <= high + slack


@given(seeds, widths, floors)
def test_rms_norm_gain_brackets_autograd(seed: int, D: int, eps: float) -> None:
    x, weight = token(seed, D), token(seed + 1, D)
    truth = oracle.spectral(oracle.rms_norm_jacobian(x, weight, eps))
    low, high = rms_norm_gain(x, weight, eps=eps)
    slack = 64 * torch.finfo(x.dtype).eps * float(weight.abs().max()) / eps**0.5
    assert low - slack <= truth <= high + slack


@pytest.mark.parametrize("dtype", FLOATS)
def test_constant_weight_makes_the_gain_exact(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = token(0, 16).to(device, dtype)
    ones = torch.ones(16, dtype=torch.float64)
    low, high = layer_norm_gain(x, eps=0.1)
    assert torch.equal(low, high)
    truth = oracle.spectral(oracle.layer_norm_jacobian(x.cpu(), ones, 0.1))
    assert high.item() == pytest.approx(truth, rel=error_budget(high.dtype, ops=16))


@given(seeds, st.integers(3, 24), floors)
def test_eigenvalues_are_zero_along_and_across(seed: int, D: int, eps: float) -> None:
    x, ones = token(seed, D, offset=2.0), torch.ones(D, dtype=torch.float64)
    found = layer_norm_eigenvalues(x, eps=eps)
    expected = torch.stack([found.mean, found.along, *[found.across] * (D - 2)])
    J = oracle.layer_norm_jacobian(x, ones, eps)
    slack = 1e3 * torch.finfo(x.dtype).eps * float(found.across)
    torch.testing.assert_close(
        torch.linalg.eigvalsh(J), expected.sort().values, rtol=0, atol=slack
    )


@given(seeds, st.integers(2, 24), floors)
def test_rms_norm_eigenvalues(seed: int, D: int, eps: float) -> None:
    x, ones = token(seed, D), torch.ones(D, dtype=torch.float64)
    found = rms_norm_eigenvalues(x, eps=eps)
    expected = torch.stack([found.along, *[found.across] * (D - 1)])
    J = oracle.rms_norm_jacobian(x, ones, eps)
    slack = 1e3 * torch.finfo(x.dtype).eps * float(found.across)
    torch.testing.assert_close(
        torch.linalg.eigvalsh(J), expected.sort().values, rtol=0, atol=slack
    )
    assert found.mean.isnan()


@given(seeds, st.integers(1, 24), floors)
def test_magnitude_is_reset(seed: int, D: int, eps: float) -> None:
    x, weight, bias = 1e6 * token(seed, D), token(seed + 1, D), token(seed + 2, D)
    y = torch.nn.functional.layer_norm(x, x.shape, weight, bias, eps)
    ours, published = magnitude_reset_rms(weight, bias), magnitude_reset(weight, bias)
    assert rms(y) <= ours * (1 + 1e-12)
    assert ours <= published * (1 + 1e-12)
    assert magnitude_reset(weight) == magnitude_reset_rms(weight) == weight.abs().max()


@given(seeds, st.integers(3, 16), floors)
def test_global_constant_is_never_exceeded(seed: int, D: int, eps: float) -> None:
    x, weight = token(seed, D), token(seed + 1, D)
    bound = norm_lipschitz(weight, eps=eps)
    assert layer_norm_gain(x, weight, eps=eps).upper <= bound * (1 + 1e-12)
    assert rms_norm_gain(x, weight, eps=eps).upper <= bound * (1 + 1e-12)


def test_global_constant_is_attained_without_variance() -> None:
    x, weight = torch.full((5,), 7.0, dtype=torch.float64), torch.ones(5).double()
    truth = oracle.spectral(oracle.layer_norm_jacobian(x, weight, 1e-5))
    assert norm_lipschitz(weight, eps=1e-5) == pytest.approx(truth)
    assert truth == pytest.approx(316.2, abs=0.1)


@given(seeds, st.integers(1, 12), st.integers(1, 12))
def test_mixing_tokens_never_increases_the_block_norm(
    seed: int, L: int, D: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(L, D, generator=rng, dtype=torch.float64)
    mix = torch.randn(L, L, generator=rng, dtype=torch.float64).mul(3).softmax(-1)
    assert block_norm(mix @ x) <= block_norm(x) * (1 + 1e-14)


@pytest.mark.parametrize("dtype", FLOATS)
def test_scales_match_torch(dtype: torch.dtype, device: torch.device) -> None:
    x = token(3, 33, offset=1.0).to(device, dtype)
    double = x.double().cpu()
    sigma = (double.var(correction=0) + 1e-3).sqrt()
    root = (double.square().mean() + 1e-3).sqrt()
    found = layer_norm_scale(x, eps=1e-3), rms_norm_scale(x, eps=1e-3)
    budget = error_budget(found[0].dtype, ops=33)
    assert found[0].item() == pytest.approx(float(sigma), rel=budget)
    assert found[1].item() == pytest.approx(float(root), rel=budget)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_neither_end_of_float32_is_lost(size: float) -> None:
    x = torch.tensor([3.0, -3.0, 3.0, -3.0]) * size
    assert rms(x).item() == pytest.approx(3 * size, rel=1e-6)
    assert layer_norm_gain(x, eps=0.0).upper.item() == pytest.approx(1 / (3 * size))
    assert layer_norm_eigenvalues(x, eps=1e-5).along.isfinite()


def test_nan_in_gives_nan_out() -> None:
    x = torch.tensor([[1.0, math.nan, 0.0], [1.0, 2.0, 0.0]])
    for value in (rms(x), *layer_norm_gain(x, eps=1e-5), *rms_norm_gain(x, eps=1e-5)):
        assert value.isnan().tolist() == [True, False]
    assert block_norm(x).isnan()


def test_unusable_input_is_an_error() -> None:
    with pytest.raises(InputError, match="real floats"):
        rms(torch.ones(3, dtype=torch.int64))
    with pytest.raises(InputError, match="last axis"):
        rms(torch.ones(3, 0))
    with pytest.raises(InputError, match="not negative"):
        layer_norm_scale(torch.ones(3), eps=-1.0)
    with pytest.raises(InputError, match="positive"):
        norm_lipschitz(torch.ones(3), eps=0.0)
    with pytest.raises(InputError, match="channels"):
        layer_norm_gain(torch.ones(3), torch.ones(4), eps=1e-5)
