"""Stochastic Lanczos quadrature, against moments and counts of a dense spectrum."""

import math

import numpy as np
import pytest
import torch

from equipoise.errors import InputError
from equipoise.numerics.spectra.density import spectral_density
from equipoise.numerics.spectra.lanczos import Krylov, operator_step


def spectrum(width: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(width, generator=rng, dtype=torch.float64)


def test_a_rule_is_exact_for_polynomials(rng: torch.Generator) -> None:
    """Nodes and weights of m steps reproduce qᵀA^p q for every p ≤ 2m − 1."""
    d_N, steps = spectrum(40), 5
    state = rng.get_state()
    found = spectral_density(
        lambda x: d_N * x,
        40,
        probes=2,
        steps=steps,
        generator=rng,
        dtype=torch.float64,
    )
    rng.set_state(state)
    q_N = torch.randn(40, generator=rng).double()
    q_N /= q_N.norm()
    for power in range(2 * steps):
        rule = float((found.weights[0] * found.nodes[0] ** power).sum())
        assert rule == pytest.approx(float((q_N**2 * d_N**power).sum()), rel=1e-9)
    beyond = float((found.weights[0] * found.nodes[0] ** (2 * steps)).sum())
    assert beyond != pytest.approx(float((q_N**2 * d_N ** (2 * steps)).sum()), rel=1e-6)


def test_moments_and_shares_within_four_standard_errors(rng: torch.Generator) -> None:
    d_N = spectrum(400)
    found = spectral_density(
        lambda x: d_N * x, 400, probes=30, steps=12, generator=rng, dtype=torch.float64
    )
    assert found.products == 30 * 12
    for power in (1, 2, 3):
        mean, error = found.mean(power)
        assert abs(mean - float((d_N**power).mean())) <= 4 * error
    share, error = found.below(0.0)
    assert abs(share - float((d_N < 0).double().mean())) <= 4 * error + 1 / 12


def test_a_curve_is_a_density(rng: torch.Generator) -> None:
    d_N = torch.tensor([0.0] * 30 + [5.0] * 10, dtype=torch.float64)
    found = spectral_density(
        lambda x: d_N * x, 40, probes=40, generator=rng, dtype=torch.float64
    )
    at_G = np.linspace(-2, 7, 2000)
    curve_G = found.curve(at_G, bandwidth=0.1)
    assert float(np.trapezoid(curve_G, at_G)) == pytest.approx(1, abs=1e-6)
    upper = at_G > 2.5
    share = float(np.trapezoid(curve_G[upper], at_G[upper]))
    assert share == pytest.approx(0.25, abs=0.08)  # four standard errors of 40 probes


def test_nan_is_not_hidden(rng: torch.Generator) -> None:
    found = spectral_density(lambda x: x * math.nan, 5, probes=2, generator=rng)
    assert math.isnan(found.mean(1)[0])


def test_wrong_inputs(rng: torch.Generator) -> None:
    with pytest.raises(InputError, match="at least 2"):
        spectral_density(lambda x: x, 5, probes=1, generator=rng)
    with pytest.raises(InputError, match="at least one"):
        spectral_density(lambda x: x, 5, steps=0, generator=rng)
    found = spectral_density(lambda x: x, 5, probes=2, generator=rng)
    with pytest.raises(InputError, match="bandwidth"):
        found.curve(np.zeros(1), bandwidth=0)


def test_reorthogonalised_spaces_hold_no_ghosts() -> None:
    d_N = torch.logspace(0, -8, 200, dtype=torch.float32)
    krylov = Krylov(operator_step(lambda x: d_N * x), torch.ones(200), at_most=60)
    while krylov.steps < 60:
        krylov.grow()
    assert (krylov.ritz()[0] > 0.95).sum() == 1
