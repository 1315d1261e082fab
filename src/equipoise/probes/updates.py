"""How far the optimiser moves each layer, and how far that is for its weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from equipoise.anatomy.sharding import local_part
from equipoise.numerics.token_statistics import adam_norm
from equipoise.probes.capture import WithAnatomy
from equipoise.probes.gradients import owned_parameters
from equipoise.probes.protocols import Emit
from equipoise.probes.sharding import copy_count, share


@dataclass(slots=True)
class AdamUpdates(WithAnatomy):
    """Emit ‖Δw‖₂ and ‖w‖₂ per block, Δw = lr·m̂/(√v̂ + ε), from Adam's own state.

    Read after the step, when the state holds just what was applied: no copy of the
    weights is made. Decoupled weight decay is not part of Δw. Optimisers without
    Adam's state have no reading here.
    """

    name: str = "updates"
    ranks: int = 1
    """Over how many ranks the parts will be put together."""

    def on_update(self, optimizer: Optimizer, emit: Emit) -> None:
        """Emit the update that ``optimizer.step()`` has just applied."""
        if self._anatomy is None:  # no forward pass was measured in this step
            return
        groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for site, parameter in owned_parameters(self._anatomy):
            state = optimizer.state.get(parameter, {})
            if "exp_avg" in state and "exp_avg_sq" in state:
                moved = update_norm(state, groups[id(parameter)])
                if (copies := copy_count(parameter, self.ranks)) > 1:
                    moved = moved * copies**-0.5
                pair = moved, share(parameter, self.ranks)
                parts.setdefault(site, []).append(pair)
        for site, pairs in parts.items():
            moved, size = (torch.stack(column) for column in zip(*pairs, strict=True))
            emit(site, "update.norm", torch.linalg.vector_norm(moved), how="norm")
            emit(site, "weight.norm", torch.linalg.vector_norm(size), how="norm")


def update_norm(state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Return the norm of this rank's part of the update, without forming it."""
    step, (beta1, beta2) = state["step"], group["betas"]
    if isinstance(step, Tensor) and not step.is_cpu or isinstance(beta1, Tensor):
        norm: Tensor = torch.linalg.vector_norm(adam_update(state, group).float())
        return norm
    # Through NumPy: a monitor may not read a scalar out of the model's graph.
    count = float(step.detach().numpy() if isinstance(step, Tensor) else step)
    root = (1 - beta2**count) ** 0.5
    m = local_part(state["exp_avg"])
    v = local_part(state.get("max_exp_avg_sq", state["exp_avg_sq"]))
    rate = group["lr"] * root / (1 - beta1**count)
    length: Tensor = adam_norm(m, v, floor=group["eps"] * root) * rate
    return length


def adam_update(state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Return this rank's part of lr·m̂/(√v̂ + ε), as Adam and AdamW apply it.

    With the bias corrections c₁ and c₂ it is lr·(√c₂/c₁)·m/(√v + ε√c₂): one visit to
    each of the two moments.
    """
    beta1, beta2 = group["betas"]
    step = torch.as_tensor(state["step"], dtype=torch.float64)
    root = (1 - beta2**step).sqrt()
    m = local_part(state["exp_avg"])
    v = local_part(state.get("max_exp_avg_sq", state["exp_avg_sq"]))
    below = v.sqrt().add_((group["eps"] * root).to(v))
    scale = group["lr"] * root / (1 - beta1**step)
    update: Tensor = torch.div(m, below, out=below).mul_(scale.to(m))
    return update
