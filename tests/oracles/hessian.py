"""Hessian products by differencing gradients: nothing shared with double backward.

Each is a central difference, extrapolated once (Richardson): about nine digits in
float64.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

STEP = 1e-4


def differenced(
    gradient: Callable[[Tensor], Tensor], at_N: Tensor, along_DN: Tensor
) -> Tensor:
    """Return Hv for each direction, from a function that gives gradients."""
    rows = []
    for v_N in along_DN:
        coarse, fine = (
            (gradient(at_N + h * v_N) - gradient(at_N - h * v_N)) / (2 * h)
            for h in (2 * STEP, STEP)
        )
        rows.append((4 * fine - coarse) / 3)
    return torch.stack(rows)


def model_products(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    names: Sequence[str],
    along_DN: Tensor,
) -> Tensor:
    """Return Hv over some parameters of a model, by moving its weights and back."""
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
    found = differenced(gradient, at_N, along_DN)
    gradient(at_N)
    return found
