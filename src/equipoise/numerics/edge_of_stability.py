"""How much curvature a step size allows, optimiser by optimiser.

On a quadratic of curvature λ, w ← w − η·b with b ← βb + (1−τ)λw is a linear map; its
spectral radius passes 1 at η·λ = 2(1+β)/(1−τ), and with Nesterov's look-ahead at
η·λ = 2(1+β)/(1+2β). Adam averages (τ = β₁) and divides by P, so its bound is on the
curvature of P^{-½}HP^{-½}: 2(1+β₁)/((1−β₁)η), 38/η at β₁ = 0.9 (Cohen et al., 2022).
"""

from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError


def sgd_threshold(
    *, lr: float, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False
) -> float:
    """Return the largest curvature at which SGD does not diverge, as torch defines it.

    >>> sgd_threshold(lr=0.5), sgd_threshold(lr=0.5, momentum=0.5)
    (4.0, 6.0)
    """
    _check(lr, momentum)
    if not 0 <= dampening < 1:
        raise InputError(f"dampening {dampening}: give a number in [0, 1)")
    if momentum == 0:
        return 2 / lr
    if nesterov:
        return 2 * (1 + momentum) / ((1 + 2 * momentum) * lr)
    return 2 * (1 + momentum) / ((1 - dampening) * lr)


def adam_threshold(*, lr: float, beta1: float = 0.9) -> float:
    """Return the largest preconditioned curvature at which Adam does not diverge.

    >>> round(adam_threshold(lr=1.0), 9)
    38.0
    """
    _check(lr, beta1)
    return (2 + 2 * beta1) / ((1 - beta1) * lr)


def adam_scale(
    second: Float[Tensor, "*x"],
    *,
    step: float,
    betas: tuple[float, float],
    eps: float,
) -> Float[Tensor, "*x"]:
    """Return P = (1−β₁ᵗ)·(√(v/(1−β₂ᵗ)) + ε), by which Adam divides its average.

    >>> import torch
    >>> adam_scale(torch.tensor([0.25]), step=1, betas=(0.5, 0.75), eps=0.0)
    tensor([0.5000])
    """
    if step < 1:
        raise InputError("Adam has not taken a step: it has no second moment yet")
    first, later = 1 - betas[0] ** step, 1 - betas[1] ** step
    scale: Tensor = first * ((second / later).sqrt() + eps)
    return scale


def _check(lr: float, momentum: float) -> None:
    if not lr > 0:
        raise InputError(f"lr {lr}: give a positive step size")
    if not 0 <= momentum < 1:
        raise InputError(f"momentum {momentum}: give a number in [0, 1)")
