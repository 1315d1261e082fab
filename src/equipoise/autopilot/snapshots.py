"""Snapshots in host memory: weights, buffers and optimiser state to go back to.

Taking one changes nothing in the run. Random streams and the data are not part of it:
a loop goes on with its next batches. Options of parameter groups are not part of it
either, because schedules own them. Under FSDP2 each rank keeps its own shards.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.sharding import local_part
from equipoise.anatomy.sites import unwrapped

KEPT = 8
"""Snapshots that are kept, the first one included, if they fit the memory."""
GB = 1e9


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a training before the update of one step."""

    step: int
    values: dict[str, Tensor]
    """Parameters and buffers by name."""
    state: dict[str, dict[str, Any]]
    """Parameter name → its optimiser state."""

    @property
    def bytes(self) -> int:
        tensors = [*self.values.values()]
        tensors += [x for s in self.state.values() for x in s.values() if _is_tensor(x)]
        return sum(x.numel() * x.element_size() for x in tensors)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _copied(value: Any) -> Any:
    """Return a copy in host memory; numbers are what they are."""
    if not isinstance(value, Tensor):
        return value
    return local_part(value.detach()).to("cpu", copy=True)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def take(step: int, model: nn.Module, optimizer: Optimizer) -> Snapshot:
    """Return a snapshot of the present state."""
    inner = unwrapped(model)
    return Snapshot(
        step,
        {name: _copied(x) for name, x in _named_tensors(inner)},
        {
            name: {key: _copied(x) for key, x in optimizer.state[p].items()}
            for name, p in inner.named_parameters()
            if p in optimizer.state
        },
    )


@torch.no_grad()
def restore(snapshot: Snapshot, model: nn.Module, optimizer: Optimizer) -> None:
    """Write a snapshot into the model and the optimiser, in place.

    What is not in it (a parameter that a remedy added since) stays as it is.
    """
    inner = unwrapped(model)
    for name, x in _named_tensors(inner):
        if name in snapshot.values:
            local_part(x.detach()).copy_(snapshot.values[name])
    for name, p in inner.named_parameters():
        if name not in snapshot.values:
            continue
        kept = snapshot.state.get(name)
        if kept is None:
            optimizer.state.pop(p, None)
        else:
            _restore_state(optimizer.state[p], kept, p)


def _restore_state(state: dict[str, Any], kept: dict[str, Any], p: Tensor) -> None:
    for key, value in kept.items():
        here = state.get(key)
        if not isinstance(value, Tensor):
            state[key] = value
            continue
        if here is None:  # forgotten since: moments are shaped like the parameter
            shaped = value.shape == local_part(p.detach()).shape
            here = state[key] = torch.zeros_like(p) if shaped else value.clone()
        local_part(here.detach()).copy_(value)


@dataclass(slots=True, kw_only=True)
class Snapshots:
    """The first snapshot of a run and the latest ones, within a bound of memory."""

    every: int
    memory: float
    """GB."""
    kept: list[Snapshot] = field(default_factory=list)
    too_large: int = 0
    """Bytes of one snapshot, if not even two of them fit."""

    def due(self, step: int) -> bool:
        """Whether one is taken before this step's update."""
        if self.too_large or not self.memory:
            return False
        return not self.kept or step >= self.kept[-1].step + self.every

    def take(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Take one, and drop the oldest but the first where memory is short."""
        new = take(step, model, optimizer)
        room = int(self.memory * GB // max(1, new.bytes))
        if room < 2:
            self.too_large, self.kept = new.bytes, []
            return
        self.kept.append(new)
        while len(self.kept) > min(KEPT, room):
            del self.kept[1]

    def forget_after(self, step: int) -> None:
        """Drop what came after a step that the run went back to."""
        self.kept = [s for s in self.kept if s.step <= step]
