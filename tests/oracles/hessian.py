"""Hessians by differencing gradients, eigenvalues by a dense decomposition.

Shares nothing with double backward: each column is a central difference, extrapolated
once (Richardson), so float64 leaves about nine digits.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

STEP = 1e-4


def differenced(
    gradient: Callable[[Tensor], Tensor], at_N: Tensor, *, step: float = STEP
) -> Tensor:
    """Return the matrix of second derivatives from a function that gives the first."""
    columns = []
    for n in range(at_N.numel()):
        e_N = torch.zeros_like(at_N)
        e_N[n] = 1
        coarse, fine = (
            (gradient(at_N + h * e_N) - gradient(at_N - h * e_N)) / (2 * h)
            for h in (2 * step, step)
        )
        columns.append((4 * fine - coarse) / 3)
    return torch.stack(columns, 1)


def model_hessian(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], names: Sequence[str]
) -> Tensor:
    """Return the Hessian over some parameters of a model, writing to its weights."""
    chosen = [dict(model.named_parameters())[name] for name in names]

    def gradient(w_N: Tensor) -> Tensor:
        sizes = [p.numel() for p in chosen]
        with torch.no_grad():
            for p, part in zip(chosen, w_N.split(sizes), strict=True):
                p.copy_(part.view_as(p))
        found = torch.autograd.grad(
            loss(model), chosen, allow_unused=True, materialize_grads=True
        )
        return torch.cat([g.reshape(-1) for g in found])

    at_N = torch.cat([p.detach().reshape(-1) for p in chosen]).clone()
    found = differenced(gradient, at_N)
    gradient(at_N)
    return found
