"""Thresholds against the optimisers themselves, on a quadratic they must diverge on."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from equipoise.errors import InputError
from equipoise.numerics.edge_of_stability import (
    adam_scale,
    adam_threshold,
    sgd_threshold,
)


def diverges(make: Callable[[nn.Parameter], Optimizer], curvature: float) -> bool:
    """Run torch's own optimiser on ½λw², away from 0, and see whether w grows."""
    w = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = make(w)
    sizes = []
    for _ in range(4000):
        w.grad = curvature * w.detach()
        optimizer.step()
        sizes.append(abs(w.item()))
        if sizes[-1] > 1e6:
            return True
    return max(sizes[-200:]) > max(sizes[:200])


SGDS = [
    {},
    {"momentum": 0.5},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.9},
    {"momentum": 0.6, "nesterov": True},
]


@pytest.mark.parametrize("settings", SGDS, ids=str)
def test_sgd_diverges_just_beyond_its_threshold(settings: dict[str, float]) -> None:
    lr = 0.1
    edge = sgd_threshold(lr=lr, **settings)  # type: ignore[arg-type]

    def make(w: nn.Parameter) -> Optimizer:
        return SGD([w], lr=lr, **settings)  # type: ignore[arg-type]

    assert diverges(make, 1.01 * edge) and not diverges(make, 0.99 * edge)


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9])
def test_adam_diverges_just_beyond_its_threshold(beta1: float) -> None:
    """With β₂ = 1 the second moment stands still, as the theory assumes."""
    lr, second, eps = 0.02, 4.0, 1e-3

    def run(ratio: float) -> bool:
        w = m = 1.0
        scale = float(
            adam_scale(
                torch.tensor([second]).double(), step=1e6, betas=(beta1, 0.0), eps=eps
            )
        )
        curvature = ratio * adam_threshold(lr=lr, beta1=beta1) * scale
        sizes = []
        for _ in range(4000):
            m = beta1 * m + (1 - beta1) * curvature * w
            w -= lr * m / (second**0.5 + eps)
            sizes.append(abs(w))
            if abs(w) > 1e6:
                return True
        return max(sizes[-200:]) > max(sizes[:200])

    assert run(1.01) and not run(0.99)
    assert adam_threshold(lr=0.5) == pytest.approx(76)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adams_scale_is_what_torch_divides_by(amsgrad: bool) -> None:
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5, dtype=torch.float64))
    adam = torch.optim.Adam([w], lr=0.1, betas=(0.8, 0.9), eps=1e-3, amsgrad=amsgrad)
    for _ in range(3):
        before = w.detach().clone()
        w.grad = torch.randn(5, dtype=torch.float64)
        adam.step()
    state = adam.state[w]
    scale = adam_scale(
        state["max_exp_avg_sq" if amsgrad else "exp_avg_sq"],
        step=3,
        betas=(0.8, 0.9),
        eps=1e-3,
    )
    assert torch.allclose(before - w.detach(), 0.1 * state["exp_avg"] / scale)


def test_wrong_inputs() -> None:
    with pytest.raises(InputError, match="step size"):
        adam_threshold(lr=0)
    with pytest.raises(InputError, match="momentum"):
        sgd_threshold(lr=1, momentum=1)
    with pytest.raises(InputError, match="dampening"):
        sgd_threshold(lr=1, momentum=0.5, dampening=1)
    with pytest.raises(InputError, match="not taken a step"):
        adam_scale(torch.ones(1), step=0, betas=(0.9, 0.9), eps=0)
