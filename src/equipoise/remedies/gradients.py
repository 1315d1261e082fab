"""Remedies between backward and step: clip gradients or updates, skip a step.

Gradients are seen as the optimiser gets them: unscaled, and clipped by the loop if it
clips. Norms are over all ranks that hold a part, so every rank acts alike.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.sharding import local_part, whole
from equipoise.remedies.base import Changes, Positive, RecordedRemedy, Undo
from equipoise.remedies.optimiser import scale_updates


def with_gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that have a gradient now, in the optimiser's order."""
    return [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]


def norm(x: Tensor) -> Tensor:
    """Return ‖x‖ in float32 over all ranks that hold a part of it."""
    return whole(torch.linalg.vector_norm(x.detach(), dtype=torch.float32))


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of many tensors together."""
    norms = [norm(x) for x in tensors]
    if not norms:
        return torch.zeros(())
    here = [n.to(norms[0].device) for n in norms]
    found: Tensor = torch.linalg.vector_norm(torch.stack(here))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientClip(RecordedRemedy):
    """Scale the gradient down to a largest norm."""

    limit: Positive = 1.0
    """Largest norm over all parameters."""
    name: ClassVar[str] = "gradient_clip"

    def change(self, changes: Changes) -> Undo:
        changes.before_step(self._clip)
        return changes.applied(limit=self.limit)

    def _clip(self, optimizer: Optimizer) -> None:
        grads = _grads(with_gradients(optimizer))
        share = (self.limit / (total_norm(grads) + 1e-6)).clamp(max=1.0)
        for grad in grads:
            local_part(grad).mul_(share.to(grad.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveClip(RecordedRemedy):
    """Limit each row's gradient to a share of the row's own norm.

    Adaptive gradient clipping (Brock et al., arXiv 2102.06171): ‖g‖ ≤ λ·max(‖w‖, 10⁻³)
    for every row of a matrix. Vectors are left alone.
    """

    share: Positive = 0.05
    name: ClassVar[str] = "adaptive_clip"

    def change(self, changes: Changes) -> Undo:
        changes.before_step(lambda o: _clip_rows(with_gradients(o), self.share))
        return changes.applied(share=self.share)


def _clip_rows(parameters: list[Tensor], share: float) -> None:
    for p, g in zip(parameters, _grads(parameters), strict=True):
        if p.dim() >= 2:
            weight, grad = local_part(p.detach()), local_part(g)
            limit = share * _row_norms(weight).clamp(min=1e-3)
            grad.mul_((limit / _row_norms(grad).clamp(min=1e-12)).clamp(max=1.0))


def _row_norms(x: Tensor) -> Tensor:
    axes = tuple(range(1, x.dim()))
    found: Tensor = torch.linalg.vector_norm(x, dim=axes, keepdim=True)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeHandling(RecordedRemedy):
    """Limit each parameter's gradient to a little more than it usually is.

    AdaGC (Wang et al., arXiv 2502.11034): ‖g‖ ≤ λ·γ, with γ a running mean of what was
    let through. For the first steps, while γ is found, the norm over all is clipped at
    1. A gradient that is not finite is left out for its parameter.
    """

    ratio: Positive = 1.05
    decay: float = 0.98
    warmup: int = 10
    name: ClassVar[str] = "spike_handling"

    def change(self, changes: Changes) -> Undo:
        changes.count_steps()
        # By the parameter's place in the optimiser, so that a checkpoint may carry it.
        changes.progress["usual"] = dict[int, Tensor]()

        def clip(optimizer: Optimizer) -> None:
            early = changes.progress["step"] < self.warmup
            self._clip(optimizer, changes.progress["usual"], early=early)

        changes.before_step(clip)
        return changes.applied(ratio=self.ratio)

    def _clip(
        self, optimizer: Optimizer, usual: dict[int, Tensor], *, early: bool
    ) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if early:
            share = (1.0 / (total_norm(_grads(parameters)) + 1e-6)).clamp(max=1.0)
        for place, p in enumerate(parameters):
            if (grad := p.grad) is None:
                continue
            size = norm(grad)
            if early:
                limit = size * share.to(size.device)
            else:
                limit = self.ratio * usual.get(place, size)
            through = torch.where(size.isfinite(), torch.minimum(size, limit), 0.0)
            here = local_part(grad)
            here.nan_to_num_(0.0, 0.0, 0.0)
            here.mul_(torch.where(size > 0, through / size.clamp(min=1e-12), 0.0))
            old = usual.get(place, through)
            new = self.decay * old + (1 - self.decay) * through
            usual[place] = torch.minimum(old, through) if early else new


def _grads(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


WINDOW = 64
"""Norms by which the usual one is known."""
LEAST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipStep(RecordedRemedy):
    """Leave out steps whose gradient norm is far above the median of the last ones.

    Weights and moments stay as they are then, bit for bit. Reading the norm waits for
    the device at every step.
    """

    times: Positive = 4.0
    most: int = 8
    """Steps in a row that may be left out; then one is taken, and the usual follows."""
    always: bool = False
    """Leave out every step until it is undone; no norm is read then."""
    name: ClassVar[str] = "skip_step"

    def change(self, changes: Changes) -> Undo:
        state = _Skipping(self)
        changes.progress.update(state.progress)
        state.progress = changes.progress
        changes.before_step(state.before)
        changes.after_step(state.after)
        return changes.applied(times=self.times)


@dataclass(slots=True)
class _Skipping:
    options: SkipStep
    progress: dict[str, Any] = field(
        default_factory=lambda: {"norms": [], "in_a_row": 0, "skipped": 0}
    )
    removed: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def before(self, optimizer: Optimizer) -> None:
        found = with_gradients(optimizer)
        size = 0.0 if self.options.always else float(total_norm(_grads(found)))
        if not (self.options.always or self._is_far(size)):
            self.progress["norms"] = [*self.progress["norms"], size][-WINDOW:]
            self.progress["in_a_row"] = 0
            return
        self.progress["in_a_row"] += 1
        self.progress["skipped"] += 1
        for p in found:  # an optimiser passes over what has no gradient
            assert p.grad is not None
            self.removed.append((p, p.grad))
            p.grad = None

    def _is_far(self, size: float) -> bool:
        if size != size or size == float("inf"):
            return True
        norms = self.progress["norms"]
        if len(norms) < LEAST or self.progress["in_a_row"] >= self.options.most:
            return False
        return bool(size > self.options.times * statistics.median(norms))

    def after(self, optimizer: Optimizer) -> None:
        for p, grad in self.removed:
            p.grad = grad
        self.removed.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateClip(RecordedRemedy):
    """Limit how far one step moves each matrix, beside the matrix itself."""

    ratio: Positive = 0.02
    """Largest ‖ΔW‖/‖W‖."""
    name: ClassVar[str] = "update_clip"

    def change(self, changes: Changes) -> Undo:
        groups = changes.required_optimizer.param_groups
        matrices = [p for g in groups for p in g["params"] if p.dim() >= 2]
        scale_updates(changes, matrices, self._share)
        return changes.applied(ratio=self.ratio)

    def _share(self, p: nn.Parameter, moved: Tensor) -> Tensor:
        # The weight before the step; with W + ΔW a matrix at zero could never move.
        size = norm(p.detach() - moved).clamp(min=1e-3 * p.numel() ** 0.5)
        return (self.ratio * size / norm(moved).clamp(min=1e-12)).clamp(max=1.0)
