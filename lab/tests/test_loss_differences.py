"""Losses sample by sample, and how their mean moves, against doing it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equipoise.auditing.curvature import eigenvalues, hessian
from equipoise.errors import InputError
from equipoise_lab.studies.loss_differences import (
    difference_on,
    excess_risk,
    moved,
    sample_losses,
)
from tests.auditing.curvature import subjects


def test_single_losses_average_to_the_loss() -> None:
    model, batch = subjects.gpt(), subjects.pair(5)
    each_S = sample_losses(model, batch)
    assert each_S.shape == (5,)
    whole = subjects.cross_entropy(model.eval(), batch).item()
    assert each_S.mean().item() == pytest.approx(whole)
    given = sample_losses(
        model, batch, loss=lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten())
    )
    assert torch.allclose(each_S, given)


def test_a_move_is_a_change_of_weights() -> None:
    model, batch = subjects.gpt(), subjects.pair(3)
    v_N = torch.randn(hessian(model, batch).width).double()
    away_S = sample_losses(model, batch, move=moved(model, v_N))
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()) + v_N, model.parameters()
    )
    assert torch.allclose(away_S, sample_losses(model, batch))


def test_the_quadratic_is_the_difference_of_means_nearby(rng: torch.Generator) -> None:
    model, (x, y) = subjects.gpt(depth=1), subjects.pair(6)
    old, new = (x[:5], y[:5]), (x[5:], y[5:])
    top = eigenvalues(hessian(model, (x, y)), 2)
    basis_DN = torch.stack([e.vector for e in top if e.vector is not None])
    found = difference_on(model, old, new, basis_DN=basis_DN)
    z_D = torch.randn(2, generator=rng, dtype=torch.float64)

    def truth(step: float) -> float:
        move = moved(model, step * z_D @ basis_DN)
        all_S, old_S = (sample_losses(model, b, move=move) for b in ((x, y), old))
        return float(all_S.mean() - old_S.mean())

    def model_of(step: float) -> float:
        z = step * z_D
        return float(found.value + found.slope_D @ z + z @ found.bend_DD @ z / 2)

    errors = [abs(truth(step) - model_of(step)) for step in (0.02, 0.01)]
    # The error of a quadratic falls like the cube of the step: by 8 when it halves.
    assert errors[1] < 1e-4 and 6 < errors[0] / errors[1] < 11
    assert found.delta_two(0.0) == pytest.approx(truth(0.0) ** 2)


def test_excess_risk_of_a_linear_model() -> None:
    """For the mean of a normal, H = 2, C = 4·Var: the excess is Var·N/k."""
    torch.manual_seed(0)
    model = nn.Linear(1, 2, bias=False).double()
    x, y = torch.ones(400, 1).double(), torch.randn(400, 2).double()
    with torch.no_grad():
        model.weight.copy_(y.mean(0)[:, None])
    found = excess_risk(model, (x, y), samples=10, parameters=("weight",))
    # MSE averages over the two outputs: half of Σ Var.
    assert found == pytest.approx(float(y.var(0).sum()) / 2 / 10, rel=1e-9)


def test_what_has_no_single_losses() -> None:
    with pytest.raises(InputError, match="single samples"):
        sample_losses(nn.Linear(2, 2), {"input": torch.ones(3, 2)})
