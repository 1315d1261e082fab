"""How far the optimiser moves each layer, and how far that is for its weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.sites import Anatomy
from equipoise.probes.capture import Guarded
from equipoise.probes.emission import Emit
from equipoise.probes.gradients import owned_parameters


@dataclass(slots=True)
class AdamUpdates:
    """Emit ‖Δw‖₂ and ‖Δw‖₂/‖w‖₂ per block, Δw = lr·m̂/(√v̂ + ε), from Adam's own state.

    Read after the step, when the state holds just what was applied: no copy of the
    weights is made. Decoupled weight decay is not part of Δw. Optimisers without
    Adam's state have no reading here.
    """

    name: str = "updates"
    _anatomy: Anatomy | None = None

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self._anatomy = anatomy
        yield from ()

    def on_update(self, optimizer: Optimizer, emit: Emit) -> None:
        """Emit the update that ``optimizer.step()`` has just applied."""
        assert self._anatomy is not None
        groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
        squares: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for site, parameter in owned_parameters(self._anatomy):
            state = optimizer.state.get(parameter, {})
            if "exp_avg" in state and "exp_avg_sq" in state:
                moved = _square(adam_update(state, groups[id(parameter)]))
                squares.setdefault(site, []).append((moved, _square(parameter)))
        for site, pairs in squares.items():
            moved, size = (
                torch.stack(column).sum() for column in zip(*pairs, strict=True)
            )
            emit(site, "update.norm", moved.sqrt())
            emit(site, "update.ratio", (moved / size).sqrt())


def adam_update(state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Return lr·m̂/(√v̂ + ε) as Adam and AdamW apply it, amsgrad included."""
    beta1, beta2 = group["betas"]
    step = torch.as_tensor(state["step"], dtype=torch.float64)
    m_hat = state["exp_avg"] / (1 - beta1**step).to(state["exp_avg"])
    second = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    v_hat = second / (1 - beta2**step).to(second)
    update: Tensor = group["lr"] * m_hat / (v_hat.sqrt() + group["eps"])
    return update


def _square(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x.detach(), dtype=torch.float32)
    return norm**2
