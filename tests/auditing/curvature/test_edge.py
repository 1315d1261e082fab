"""Sharpness in an optimiser's own coordinates."""

import pytest
import torch
from torch import nn

from equipoise.auditing.curvature import (
    edge_of_stability,
    hessian,
    preconditioned,
    scale_of,
    sgd_threshold,
)
from equipoise.errors import InputError
from equipoise.numerics.spectra.estimate import Search
from tests.auditing.curvature import subjects

BATCH = subjects.pair()
TIGHT = Search(tolerance=1e-6, at_most=500)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        subjects.cross_entropy(model, BATCH).backward()
        optimizer.step()


def dense_truth(model: nn.Module, scale_N: torch.Tensor) -> float:
    matrix = hessian(model, BATCH).dense()
    root_N = scale_N.sqrt()
    return float(torch.linalg.eigvalsh(root_N[:, None] * matrix * root_N)[-1])


def test_adam_against_its_own_state() -> None:
    model = subjects.gpt(depth=1)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), eps=1e-4)
    trained(model, adam)
    edge = edge_of_stability(model, BATCH, adam, search=TIGHT)
    parts = []
    for p in model.parameters():
        v = adam.state[p]["exp_avg_sq"] / (1 - 0.9**3)
        parts.append(1 / ((1 - 0.8**3) * (v.sqrt() + 1e-4)).flatten())
    assert edge.value.value == pytest.approx(
        dense_truth(model, torch.cat(parts)), rel=1e-5
    )
    assert edge.threshold == pytest.approx(2 * 1.8 / 0.2 / 1e-2)
    assert edge.ratio == edge.value.value / edge.threshold
    assert (edge.kind, edge.lr) == ("adam", 1e-2)


def test_groups_are_put_on_one_scale() -> None:
    """λ/threshold must not depend on which group's step size is the reference."""
    model = subjects.gpt(depth=1)
    norms = [p for p in model.parameters() if p.ndim < 2]
    rest = [p for p in model.parameters() if p.ndim >= 2]
    sgd = torch.optim.SGD(
        [{"params": norms, "lr": 0.5}, {"params": rest, "lr": 0.1}], momentum=0.9
    )
    edge = edge_of_stability(model, BATCH, sgd, search=TIGHT)
    scale_N = torch.cat(
        [
            torch.full((p.numel(),), 1.0 if p.ndim < 2 else 0.2)
            for p in model.parameters()
        ]
    ).double()
    assert edge.value.value == pytest.approx(dense_truth(model, scale_N), rel=1e-5)
    assert edge.threshold == sgd_threshold(lr=0.5, momentum=0.9)


def test_what_the_optimiser_does_not_hold_does_not_move() -> None:
    model = subjects.gpt(depth=1)
    sgd = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    even = preconditioned(hessian(model, BATCH), scale_of(model, sgd))
    product = even.split(even(torch.ones(even.width).double()))
    assert product["token_embedding.weight"].eq(0).all()
    moved = even.block("blocks.*")
    assert float(moved(torch.ones(moved.width).double()).norm()) > 0


def test_sharpness_beyond_the_threshold_is_where_sgd_diverges() -> None:
    """Full-batch descent on a linear model: a quadratic, so the edge is sharp."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 3).double(), torch.randn(20, 1).double()
    for factor, expected in ((0.98, False), (1.02, True)):
        model = nn.Linear(3, 1).double()
        probe = torch.optim.SGD(model.parameters(), lr=1.0)
        sharp = edge_of_stability(model, (x, y), probe, search=TIGHT).value.value
        sgd = torch.optim.SGD(model.parameters(), lr=factor * 2 / sharp)
        assert edge_of_stability(
            model, (x, y), sgd, search=TIGHT
        ).ratio == pytest.approx(factor)
        losses = []
        for _ in range(400):
            sgd.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            sgd.step()
            losses.append(loss.item())
        assert (losses[-1] > losses[0]) == expected


@pytest.mark.parametrize("other", [torch.optim.NAdam, torch.optim.RMSprop])
def test_optimisers_whose_edge_is_unknown(other: type) -> None:
    model = subjects.gpt(depth=1)
    with pytest.raises(InputError, match="known for SGD, Adam"):
        scale_of(model, other(model.parameters()))


def test_wrong_moments_to_ask() -> None:
    model = subjects.gpt(depth=1)
    adam = torch.optim.Adam(model.parameters())
    subjects.cross_entropy(model, BATCH).backward()
    with pytest.raises(InputError, match="not taken a step"):
        scale_of(model, adam)
    stranger = torch.optim.SGD(subjects.gpt(depth=1).parameters(), lr=0.1)
    with pytest.raises(InputError, match="none of this model"):
        scale_of(model, stranger)
    with pytest.raises(InputError, match="step size of the optimiser is 0"):
        scale_of(model, torch.optim.SGD(model.parameters(), lr=0.0))
