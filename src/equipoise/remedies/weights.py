"""Remedies of the weights themselves: how large they may be, and where they are exact.

Norms are over whole matrices, all ranks' shards together.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.sharding import local_part
from equipoise.errors import InputError
from equipoise.remedies.base import Changes, Positive, RecordedRemedy, Undo
from equipoise.remedies.gradients import norm


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCap(RecordedRemedy):
    """Hold the norm of every matrix at a limit after each step.

    The limit is ``times`` the present norm, or that of a matrix whose entries have a
    root mean square of ``gain``/√fan-in (0.55 to 0.72 is what transformers start with),
    whichever is lower. A matrix that is above its limit is scaled now.
    """

    times: Positive = 1.0
    gain: float | None = None
    lasts: bool = True
    """Hold it after every step; False scales once, now."""
    name: ClassVar[str] = "weight_cap"

    @property
    def preserves_function(self) -> bool:
        return self.gain is None and self.times >= 1

    def change(self, changes: Changes) -> Undo:
        if self.gain is not None and not self.gain > 0:
            raise InputError(f"gain of weight_cap must be positive, not {self.gain}")
        matrices = [
            p for p in changes.model.parameters() if p.dim() >= 2 and p.requires_grad
        ]
        limits = [self._limit(p) for p in matrices]
        scaled = 0
        for p, limit in zip(matrices, limits, strict=True):
            size = float(norm(p))
            if size > limit:
                changes.value(p, p.detach() * (limit / size))
                scaled += 1
        if self.lasts:
            changes.progress["limits"] = limits
            changes.after_step(lambda optimizer: _hold(matrices, changes.progress))
        return changes.applied(matrices=len(matrices), scaled=scaled)

    def _limit(self, p: nn.Parameter) -> float:
        present = self.times * float(norm(p))
        if self.gain is None:
            return present
        rows: float = p.shape[0]  # entries ÷ fan-in
        return min(present, self.gain * math.sqrt(rows))


def _hold(matrices: list[nn.Parameter], progress: dict[str, Any]) -> None:
    for p, limit in zip(matrices, progress["limits"], strict=True):
        share = (limit / norm(p).clamp(min=1e-12)).clamp(max=1.0)
        local_part(p.detach()).mul_(share.to(p.device, p.dtype))


ROUNDED = 0.1
"""Weights nearer than this share of their norm to the exact ones were rounded; those
farther away were replaced (averaged, loaded), and are the new exact ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterWeights(RecordedRemedy):
    """Keep an exact copy of the weights, and have the optimiser step that.

    For a loop that rounds its weights between steps: what rounding takes away is put
    back before each step, so that small updates add up. The forward pass still sees the
    rounded weights.
    """

    name: ClassVar[str] = "master_weights"

    def change(self, changes: Changes) -> Undo:
        groups = changes.required_optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        narrow = [p.dtype for p in parameters if p.dtype.itemsize < 4]
        if narrow:
            raise InputError(
                "master_weights cannot hold more bits than the parameters, which are "
                f"{narrow[0]}: keep them in float32 and use torch.autocast"
            )
        exact = _Exact([(p, local_part(p.detach()).clone()) for p in parameters])
        changes.before_step(exact.put_back)
        changes.after_step(exact.keep)
        return changes.applied(parameters=len(parameters))


@dataclass(frozen=True, slots=True)
class _Exact:
    kept: list[tuple[nn.Parameter, Tensor]]

    def put_back(self, optimizer: Optimizer) -> None:
        for p, exact in self.kept:
            here = local_part(p.detach())
            near = (here - exact).norm() <= ROUNDED * exact.norm()
            here.copy_(torch.where(near, exact, here))

    def keep(self, optimizer: Optimizer) -> None:
        for p, exact in self.kept:
            exact.copy_(local_part(p.detach()))
