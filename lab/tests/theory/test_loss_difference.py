"""Laws of running means, against sampling, refitting and brute force."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import InputError
from equipoise_lab.theory.loss_difference import (
    Gap,
    batch_difference,
    delta_two,
    expected_square,
    log_slope,
    loss_differences,
    sufficient_samples,
    takeuchi,
)

reals = st.floats(-10, 10)


@given(st.lists(reals, min_size=2, max_size=30))
def test_the_identity_is_the_difference_of_means(losses: list[float]) -> None:
    found = loss_differences(torch.tensor(losses, dtype=torch.float64))
    means = [np.mean(losses[:k]) for k in range(1, len(losses) + 1)]
    assert np.allclose(found.numpy(), np.diff(means), atol=1e-12)


@given(st.lists(reals, min_size=1, max_size=9), st.lists(reals, min_size=1, max_size=9))
def test_a_batch_moves_the_mean(old: list[float], new: list[float]) -> None:
    found = batch_difference(
        float(np.mean(new)), float(np.mean(old)), samples=len(old), batch=len(new)
    )
    assert found == pytest.approx(np.mean(old + new) - np.mean(old), abs=1e-9)


@given(
    old=st.lists(st.tuples(*[st.floats(-3, 3)] * 4), min_size=1, max_size=5),
    new=st.tuples(*[st.floats(-3, 3)] * 4),
    w0=st.floats(-2, 2),
    r=st.floats(0, 2),
    sign=st.sampled_from([-1, 1]),
)
def test_the_bound_holds_for_cubics_anywhere(
    old: list[tuple[float, ...]],
    new: tuple[float, ...],
    w0: float,
    r: float,
    sign: int,
) -> None:
    """ℓ = a + bw + cw² + dw³: its Hessian is Lipschitz with 6|d| exactly."""
    mean = np.mean(old, axis=0)
    a, b, c, d = np.array(new) - mean
    rho = 6 * max(abs(new[3]), abs(mean[3]))
    gap = Gap(
        value=abs(a + b * w0 + c * w0**2 + d * w0**3),
        gradient=abs(b + 2 * c * w0 + 3 * d * w0**2),
        hessian=abs(2 * c + 6 * d * w0),
        lipschitz=rho,
        distance=r,
    )
    w = w0 + sign * r
    truth = abs(a + b * w + c * w**2 + d * w**3) / (len(old) + 1)
    assert truth <= gap.bound(len(old)) * (1 + 1e-9) + 1e-9


def test_each_term_of_the_bound_is_needed() -> None:
    """Losses for which one term alone is attained, or nearly."""
    for power, name, coefficient in (
        (0, "value", 1),
        (1, "gradient", 1),
        (2, "hessian", 2),
    ):
        sizes = {"value": 0, "gradient": 0, "hessian": 0, "lipschitz": 0}
        gap = Gap(**{**sizes, name: coefficient}, distance=3.0)  # type: ignore[arg-type]
        assert gap.bound(4) == pytest.approx(3.0**power / 5)
    # ℓ_{k+1} = w³, 𝓛_k = −w³: each has a Hessian of Lipschitz constant 6.
    cubic = Gap(value=0, gradient=0, hessian=0, lipschitz=6, distance=2.0)
    assert cubic.bound(1) == pytest.approx((2.0**3 + 2.0**3) / 2)


@given(numerator=st.floats(0.01, 100), target=st.floats(1e-3, 1))
def test_k_star_is_the_first_that_suffices(numerator: float, target: float) -> None:
    gap = Gap(value=numerator, gradient=0, hessian=0, lipschitz=0, distance=0)
    k = gap.sufficient(target)
    assert gap.bound(k) <= target * (1 + 1e-12)
    assert k == 1 or gap.bound(k - 1) > target
    k = sufficient_samples(numerator, target)
    assert math.sqrt(expected_square(numerator, k)) <= target * (1 + 1e-9)
    assert k == 1 or math.sqrt(expected_square(numerator, k - 1)) > target


def test_the_variance_law_is_exact_without_replacement(rng: torch.Generator) -> None:
    losses = torch.rand(6, generator=rng, dtype=torch.float64)
    orders = torch.tensor(list(itertools.permutations(range(6))))
    square_k = (loss_differences(losses[orders]) ** 2).mean(0)
    for k in range(1, 6):
        law = expected_square(float(losses.var()), k)
        assert float(square_k[k - 1]) == pytest.approx(law, rel=1e-12)


def test_running_means_of_anything_have_slope_minus_one(rng: torch.Generator) -> None:
    numbers = torch.rand(400, 1000, generator=rng, dtype=torch.float64)
    rms_k = (loss_differences(numbers) ** 2).mean(0).sqrt()
    assert log_slope(rms_k, first=10, last=900) == pytest.approx(-1, abs=0.02)


def test_takeuchi_is_what_refitting_costs(rng: torch.Generator) -> None:
    """Least squares whose noise depends on x, refitted 3000 times, 200 samples each."""
    k, truth = 200, torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    H = torch.eye(3, dtype=torch.float64)
    x = torch.randn(3000, k, 3, generator=rng, dtype=torch.float64)
    noise = torch.randn(3000, k, generator=rng, dtype=torch.float64)
    noise = noise * (1 + x[..., 0] ** 2).sqrt()
    y = x @ truth + noise
    fitted = torch.linalg.lstsq(x, y[..., None]).solution[..., 0]
    excess = ((fitted - truth) ** 2).sum(-1).mul(0.5)
    gradients = (noise[..., None] * x).reshape(-1, 3)
    law = takeuchi(H, torch.cov(gradients.mT), samples=k)
    error = 4 * float(excess.std()) / math.sqrt(3000)
    # Terms of order 1/k² are 3 % at k = 200.
    assert abs(float(excess.mean()) - law) <= error + 0.05 * law


def test_takeuchi_needs_a_minimum() -> None:
    saddle = torch.diag(torch.tensor([1.0, -1.0]))
    with pytest.raises(InputError, match="not positive definite"):
        takeuchi(saddle, torch.eye(2), samples=5)
    damped = takeuchi(saddle, torch.eye(2), samples=5, damping=2.0)
    assert damped == pytest.approx((1 / 3 + 1) / 10)


def test_delta_two_is_the_mean_over_gaussians(rng: torch.Generator) -> None:
    c, B = torch.randn(3, generator=rng), torch.randn(3, 3, generator=rng)
    a, sigma, B = 0.7, 0.5, B + B.mT
    z = sigma * torch.randn(400_000, 3, generator=rng)
    f = a + z @ c + 0.5 * torch.einsum("sd,de,se->s", z, B, z)
    square = f.double() ** 2
    error = float(square.std()) / math.sqrt(len(square))
    assert abs(float(square.mean()) - delta_two(a, c, B, sigma=sigma)) <= 4 * error


def test_nan_stays_nan() -> None:
    found = loss_differences(torch.tensor([1.0, math.nan, 2.0]))
    assert found.isnan().all()


def test_wrong_inputs() -> None:
    with pytest.raises(InputError, match="needs two"):
        loss_differences(torch.ones(1))
    with pytest.raises(InputError, match="samples 0"):
        expected_square(1.0, 0)
    with pytest.raises(InputError, match="not negative"):
        Gap(value=-1, gradient=0, hessian=0, lipschitz=0, distance=0)
    gap = Gap(value=1, gradient=0, hessian=0, lipschitz=0, distance=0)
    with pytest.raises(InputError, match="target 0"):
        gap.sufficient(0)
    with pytest.raises(InputError, match="positive target"):
        sufficient_samples(1.0, 0.0)
    with pytest.raises(InputError, match="sigma"):
        delta_two(0.0, torch.zeros(1), torch.zeros(1, 1), sigma=-1)
    with pytest.raises(InputError, match="no range"):
        log_slope(torch.ones(5), first=3, last=9)
