"""Shadow trials: candidates are tried on a copy of the model, for a few steps.

The run is not touched: the copy has its own weights and optimiser, gradients are taken
without ``backward`` (which watching listens to), and every random stream is put back.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.random_state import RandomState
from equipoise.anatomy.sharding import is_sharded
from equipoise.anatomy.sites import unwrapped
from equipoise.autopilot.snapshots import GB, Snapshot, restore
from equipoise.autopilot.treatments import Treatment
from equipoise.errors import InputError
from equipoise.remedies.catalogue import remedy

Loss = Callable[[nn.Module], Tensor]
WORSE = 1.1
"""A trial passes if it ends no higher than this beside where it began: batches differ,
and a treatment that harms does more than this within a few steps."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of a copy: its mean loss over the first steps and over the last."""

    began: float
    ended: float

    @property
    def passes(self) -> bool:
        return math.isfinite(self.ended) and self.ended <= WORSE * self.began

    def __str__(self) -> str:
        outcome = "passes" if self.passes else "fails"
        return f"shadow trial {outcome}: loss {self.began:.4g} → {self.ended:.4g}"


def no_trial(
    model: nn.Module, optimizer: Optimizer, loss: Loss | None, *, memory: float
) -> str:
    """Return why no shadow trial can be made, or nothing."""
    if loss is None:
        return "the loss of this loop is not known: give Autopilot(loss=…)"
    if any(is_sharded(p) for p in model.parameters()):
        return "the weights are sharded"
    state = [x for s in optimizer.state.values() for x in s.values()]
    tensors = [*model.parameters(), *(x for x in state if isinstance(x, Tensor))]
    size = sum(x.numel() * x.element_size() for x in tensors)
    if size > memory * GB:
        return f"a copy takes {size / GB:.3g} GB, and memory={memory:g}"
    return ""


@contextmanager
def _random_state_kept(model: nn.Module) -> Iterator[None]:
    before = RandomState.now(model)
    try:
        yield
    finally:
        before.restore()


def run_trial(
    training: tuple[nn.Module, Optimizer],
    treatment: Treatment,
    snapshot: Snapshot | None,
    *,
    loss: Loss,
    steps: int,
) -> Trial:
    """Try a treatment on a copy for some steps."""
    with _random_state_kept(training[0]):
        model, optimizer = copied(*training)
        if snapshot is not None:
            restore(snapshot, model, optimizer)
        try:
            for name, options in treatment.remedies.items():
                remedy(name, **options).apply(model, optimizer)
        except InputError:
            return Trial(math.nan, math.nan)
        losses = [_step(model, optimizer, loss) for _ in range(steps)]
    few = max(1, steps // 4)
    return Trial(sum(losses[:few]) / few, sum(losses[-few:]) / few)


def copied(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Return copies that belong together; hooks on the optimiser are not copied."""
    inner, its_optimizer = copy.deepcopy((unwrapped(model), optimizer))
    return inner, its_optimizer


def _step(model: nn.Module, optimizer: Optimizer, loss: Loss) -> float:
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():
        now = loss(model)
        grads = torch.autograd.grad(now, parameters, allow_unused=True)
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad
    optimizer.step()
    return float(now.detach())
