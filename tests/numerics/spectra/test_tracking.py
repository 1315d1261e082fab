"""Norms followed with a fixed number of steps, and the loops they are made of."""

import pytest
import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.spectra import lanczos as gram
from equipoise.numerics.spectra.tracking import (
    DISTURBED,
    _beside,
    _host_beside,
    _random,
    fixed_steps,
    tracked_norm,
)
from tests.conftest import FLOATS, error_budget
from tests.oracles import spectra as oracle


def gaussian(seed: int, M: int, N: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(M, N, generator=rng, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(40, 70), (70, 40), (64, 64), (1, 5), (5, 1)])
def test_close_when_cold_and_never_above(
    dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    matrix = gaussian(0, *shape, dtype).to(device)
    found = fixed_steps(matrix, steps=32)
    truth = oracle.spectral_norm(matrix.cpu())
    slack = error_budget(found.value.dtype, ops=64)
    assert found.value.item() == pytest.approx(truth, rel=1e-3)
    assert found.value.item() <= truth * (1 + slack)


def test_a_singular_value_lies_within_the_residual() -> None:
    matrix = gaussian(1, 60, 60, torch.float64)
    values = torch.linalg.svdvals(matrix)
    for steps in (1, 2, 5, 12):
        found = fixed_steps(matrix, steps=steps)
        assert (values - found.value).abs().min() <= found.residual * (1 + 1e-9)


def test_following_a_matrix_that_moves() -> None:
    matrix = gaussian(2, 200, 200)
    matrix += torch.outer(gaussian(3, 1, 200)[0], gaussian(4, 1, 200)[0]) / 4
    found = tracked_norm(matrix)
    for step in range(5):
        matrix = matrix + 1e-3 * gaussian(5 + step, 200, 200)
        found = tracked_norm(matrix, start=found.vectors_2N, compare=None)
        truth = oracle.spectral_norm(matrix)
        assert found.value.item() == pytest.approx(truth, rel=1e-5)


def crossing(t: float, N: int, *, rest: float, seed: int) -> Tensor:
    """A matrix whose two largest singular values change places at t = ½."""
    turn, other = (torch.linalg.qr(gaussian(seed + i, N, N)).Q for i in (0, 1))
    values = torch.linspace(rest, 0.01, N)
    values[0], values[1] = 1 - 0.007 * t, 0.993 + 0.007 * t
    return (turn * values) @ other


@pytest.mark.parametrize("rest", [0.5, 0.9, 0.98])
@pytest.mark.parametrize("N", [64, 200])
@pytest.mark.parametrize("compiled", [True, False])
def test_where_singular_values_cross_the_larger_is_followed(
    N: int, rest: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One vector alone would stay with the second: 0.7 % low, residual 1e-7."""
    monkeypatch.setattr(gram, "COMPILED", compiled and gram.COMPILED)
    found = tracked_norm(crossing(0.0, N, rest=rest, seed=N))
    for i in range(1, 33):
        matrix = crossing(min(1.0, i / 24), N, rest=rest, seed=N)
        compare = i if i % 4 == 0 else None
        found = tracked_norm(matrix, start=found.vectors_2N, compare=compare)
    truth = oracle.spectral_norm(matrix)
    assert found.value.item() == pytest.approx(truth, rel=1e-5)
    assert abs(found.value.item() - truth) <= found.error.item() + 1e-5 * truth


@pytest.mark.parametrize("seed", range(4))
def test_the_error_says_that_the_second_vector_may_be_larger(seed: int) -> None:
    """Where the second is not known well yet, the norm is not called exact.

    The second begins as the kernel's own random vector. Given one that the first
    removes but for rounding, the answer would hang on a last bit.
    """
    matrix = gaussian(seed, 200, 200)
    truth = oracle.spectral_norm(matrix)
    stuck = torch.linalg.svd(matrix).Vh[1]
    vectors_2N = torch.stack((stuck, torch.zeros_like(stuck)))
    for call in range(6):
        found = tracked_norm(matrix, start=vectors_2N, compare=call)
        assert truth - found.value.item() <= found.error.item()
        vectors_2N = found.vectors_2N
    assert found.value.item() == pytest.approx(truth, rel=1e-3)
    blind = tracked_norm(matrix, start=torch.stack((stuck, stuck)), compare=None)
    assert truth - blind.value.item() > blind.error.item()  # hence the comparison


def test_nothing_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would wait for a device; the compiled loop is CPU only and reads there."""
    matrix = gaussian(0, 50, 50)
    monkeypatch.setattr(gram, "COMPILED", False)

    def refuse(*_: object) -> float:
        raise AssertionError("the device was waited for")

    with monkeypatch.context() as patch:
        for name in ("item", "__float__", "__bool__", "__int__", "tolist", "numpy"):
            patch.setattr(torch.Tensor, name, refuse)
        found = fixed_steps(matrix, steps=8)
        tracked_norm(matrix, start=found.vector)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("M", [1, 4, 7, 50])
def test_compiled_step_agrees_with_torch(
    M: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, basis = gaussian(0, M, 33, dtype), torch.zeros(6, 33, dtype=dtype)
    basis[:5] = torch.linalg.qr(gaussian(2, 33, 5, dtype)).Q.mT
    fast, slow = basis.clone(), basis.clone()
    found = gram.matrix_step(matrix, 0.5)(fast, 4)
    monkeypatch.setattr(gram, "COMPILED", False)
    truth = gram.matrix_step(matrix, 0.5)(slow, 4)
    budget = error_budget(dtype, ops=500)
    assert found == pytest.approx(truth, rel=budget)
    torch.testing.assert_close(fast, slow, rtol=budget, atol=budget)


@pytest.mark.parametrize("steps", [1, 3, 12])
def test_both_paths_of_fixed_steps_agree(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = gaussian(0, 40, 30, torch.float64)
    fast = fixed_steps(matrix, steps=steps)
    monkeypatch.setattr(gram, "COMPILED", False)
    slow = fixed_steps(matrix, steps=steps)
    torch.testing.assert_close(fast.value, slow.value, rtol=1e-12, atol=0)
    torch.testing.assert_close(fast.residual, slow.residual, rtol=1e-5, atol=1e-12)
    aligned = (fast.vector @ slow.vector).abs()
    assert aligned.item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e30])
def test_scale_of_the_format_does_not_matter(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = gaussian(0, 30, 30)
    expected = oracle.spectral_norm(matrix * size)
    for compiled in (gram.COMPILED, False):
        monkeypatch.setattr(gram, "COMPILED", compiled)
        value = tracked_norm(matrix * size).value
        assert value.item() == pytest.approx(expected, rel=1e-3, abs=0.0)


@pytest.mark.parametrize("compiled", [True, False])
def test_zero_closed_and_broken(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gram, "COMPILED", compiled and gram.COMPILED)
    assert tracked_norm(torch.zeros(6, 6)).value == 0
    assert fixed_steps(torch.eye(6), steps=6).value == pytest.approx(1.0, rel=1e-6)
    broken = gaussian(0, 9, 9)
    broken[2, 2] = float("nan")
    assert tracked_norm(broken).value.isnan()
    broken[2, 2] = float("inf")
    after = tracked_norm(broken)
    assert after.value.isnan()
    mended = tracked_norm(torch.eye(9), start=after.vectors_2N * torch.nan)
    assert mended.value == pytest.approx(1.0, rel=1e-6)


def test_unusable_input_is_an_error() -> None:
    with pytest.raises(InputError, match="matrix is needed"):
        tracked_norm(torch.ones(3))
    with pytest.raises(InputError, match="real floats"):
        tracked_norm(torch.ones(3, 3, dtype=torch.int32))
    with pytest.raises(InputError, match="start has shape"):
        tracked_norm(torch.ones(3, 3), start=torch.ones(4))
    with pytest.raises(InputError, match="at least one"):
        fixed_steps(torch.ones(3, 3), steps=0)


@pytest.mark.parametrize("usable", [True, False])
def test_the_second_vector_starts_beside_the_first(usable: bool) -> None:
    """On the host and on a device alike: no part of the first but the disturbance's."""
    first, second, random = torch.randn(3, 12, generator=generator(3))
    first = first / first.norm()
    random = _random(first, seed=5)
    second = second + 4 * first if usable else torch.full_like(second, torch.nan)
    found = _beside(first, second, seed=5)
    host = _host_beside(first.numpy(), second.numpy(), random.numpy())
    torch.testing.assert_close(torch.from_numpy(host), found)
    beside = found - random * (DISTURBED / random.norm())
    assert abs(float(beside @ first)) < 1e-6 and float(beside.norm()) == pytest.approx(
        1
    )


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
