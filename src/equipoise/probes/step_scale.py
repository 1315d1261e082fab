"""What an optimiser multiplies each gradient by, from its own state."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import InputError
from equipoise.numerics.edge_of_stability import (
    adam_scale,
    adam_threshold,
    sgd_threshold,
)

ADAMS = ("Adam", "AdamW")
SECOND = ("max_exp_avg_sq", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScale:
    """D, per parameter, and the curvature of D^{½}HD^{½} that the step size allows.

    D is 1 for SGD and 1/P for Adam, times this group's share of the step size; what
    the optimiser does not hold does not move: 0.
    """

    kind: str
    by_name: dict[str, Tensor]
    threshold: float
    lr: float


def step_scale(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> StepScale:
    """Return how an optimiser scales the parameters of a model, by name."""
    kind = _kind(optimizer)
    allowed = {
        id(p): a for group, a in _allowed(optimizer, kind) for p in group["params"]
    }
    groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    held = [name for name, p in parameters.items() if id(p) in allowed]
    if not held:
        raise InputError("the optimiser holds none of this model's parameters")
    least = min(allowed[id(parameters[name])] for name in held)
    if math.isinf(least):
        raise InputError("every step size of the optimiser is 0: nothing can overshoot")
    scales = {
        name: (least / allowed[id(parameters[name])])
        * _inverse(optimizer, kind, parameters[name], groups[id(parameters[name])])
        for name in held
    }
    idle = {
        name: torch.zeros((), dtype=p.dtype, device=p.device)
        for name, p in parameters.items()
        if name not in scales
    }
    lr = max(float(group["lr"]) for group in optimizer.param_groups)
    return StepScale(kind=kind, by_name={**scales, **idle}, threshold=least, lr=lr)


def _kind(optimizer: Optimizer) -> str:
    names = {base.__name__ for base in type(optimizer).__mro__}
    if "SGD" in names:
        return "sgd"
    if names & set(ADAMS) and type(optimizer).__name__ not in ("NAdam", "RAdam"):
        return "adam"
    raise InputError(
        f"{type(optimizer).__name__}: the curvature a step allows is known for SGD, "
        "Adam and AdamW"
    )


def _allowed(optimizer: Optimizer, kind: str) -> Iterator[tuple[dict[str, Any], float]]:
    for group in optimizer.param_groups:
        lr = float(group["lr"])
        if lr == 0:
            yield group, math.inf
        elif kind == "adam":
            yield group, adam_threshold(lr=lr, beta1=float(group["betas"][0]))
        else:
            yield (
                group,
                sgd_threshold(
                    lr=lr,
                    momentum=group["momentum"],
                    dampening=group["dampening"],
                    nesterov=group["nesterov"],
                ),
            )


def _inverse(
    optimizer: Optimizer, kind: str, parameter: Tensor, group: dict[str, Any]
) -> Tensor:
    if kind == "sgd":
        return torch.ones((), dtype=parameter.dtype, device=parameter.device)
    state = optimizer.state.get(parameter, {})
    second = next((state[name] for name in SECOND if name in state), None)
    if second is None:
        if not parameter.requires_grad or parameter.grad is None:
            return torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        raise InputError("Adam has not taken a step: it has no second moment yet")
    whole: Tensor = getattr(second, "full_tensor", lambda: second)()
    betas = tuple(float(beta) for beta in group["betas"])
    scale = adam_scale(
        whole.detach(),
        step=float(state["step"]),
        betas=(betas[0], betas[1]),
        eps=float(group["eps"]),
    )
    return 1 / scale
