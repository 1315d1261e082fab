"""Snapshots of weights, buffers and optimiser state to go back to: in memory or a file.

Taking one changes nothing in the run. Random streams and the data are not part of it:
a loop goes on with its next batches. Options of parameter groups are not part of it
either, because schedules own them. Under FSDP2 each rank keeps its own shards.

Sizes are computed before anything is copied. What does not fit the memory goes to files
beside the run, moments in half width; a file has no name, so it is gone with the
process, however that ends, and the system writes it out while the training goes on.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.sharding import local_part
from equipoise.anatomy.sites import unwrapped

KEPT = 8
"""Snapshots that are kept, the first one included, if they fit."""
GB = 1e9
MOMENTS = 2
"""Tensors like a parameter that an optimiser keeps, until its first step shows them."""
ALIGNED = 64
FREE = 0.5
"""Share of a disk's room that snapshots may fill."""
Copy = Callable[[Tensor, bool], Tensor]
"""A tensor, and whether it is a moment → its copy."""


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


def in_memory(x: Tensor, moment: bool) -> Tensor:
    """Return a copy in host memory."""
    return x.to("cpu", copy=True)


class File:
    """Room for one snapshot in a file that has no name any more."""

    def __init__(self, folder: Path, size: int) -> None:
        handle, name = tempfile.mkstemp(prefix=".equipoise-snapshot-", dir=folder)
        try:
            # Now: a full disk that is met while memory is written ends the process.
            os.posix_fallocate(handle, 0, size)
            self._room = torch.from_file(name, True, size, dtype=torch.uint8)
        finally:
            os.close(handle)
            Path(name).unlink()
        self._used = 0

    def copy(self, x: Tensor, moment: bool) -> Tensor:
        """Return a copy in the file; moments of float32 in bfloat16."""
        dtype = _dtype(x, moment)
        size = x.numel() * dtype.itemsize
        place = self._room[self._used : self._used + size].view(dtype).view(x.shape)
        self._used += _aligned(size)
        return place.copy_(x)


def _dtype(x: Tensor, moment: bool) -> torch.dtype:
    narrow = moment and x.dtype == torch.float32 and x.dim() > 0
    return torch.bfloat16 if narrow else x.dtype


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _copied(value: Any, copy: Copy) -> Any:
    """Return a copy of an entry of the optimiser's state; numbers are what they are."""
    if not isinstance(value, Tensor):
        return value
    return copy(local_part(value.detach()), True)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@dataclass(frozen=True, slots=True)
class SnapshotSizes:
    """Bytes of one snapshot, in memory and in a file."""

    memory: int
    file: int


def sizes_of(model: nn.Module, optimizer: Optimizer) -> SnapshotSizes:
    """Return how large a snapshot will be, with moments that are still to come."""
    inner = unwrapped(model)
    whole = small = 0
    for _, x in _named_tensors(inner):
        size = _bytes(x)
        whole, small = whole + size, small + _aligned(size)
    for group in optimizer.param_groups:
        for p in group["params"]:
            kept = [x for x in optimizer.state.get(p, {}).values() if _is_tensor(x)]
            for x in kept or [p] * MOMENTS * p.requires_grad:
                x = local_part(x.detach())
                whole += _bytes(x)
                small += _aligned(x.numel() * _dtype(x, True).itemsize)
    return SnapshotSizes(whole, small)


def _bytes(x: Tensor) -> int:
    x = local_part(x.detach())
    return x.numel() * x.element_size()


def take(
    step: int, model: nn.Module, optimizer: Optimizer, copy: Copy = in_memory
) -> Snapshot:
    """Return a snapshot of the present state."""
    inner = unwrapped(model)
    return Snapshot(
        step,
        {n: copy(local_part(x.detach()), False) for n, x in _named_tensors(inner)},
        {
            name: {key: _copied(x, copy) for key, x in optimizer.state[p].items()}
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


Place = Literal["", "in memory", "on disk", "nowhere"]


@dataclass(slots=True, kw_only=True)
class Snapshots:
    """The first snapshot of a run and the latest ones, within a bound of memory."""

    every: int
    memory: float
    """GB."""
    folder: Path | None = None
    """Where files may lie that memory has no room for."""
    kept: list[Snapshot] = field(default_factory=list)
    place: Place = ""
    """Chosen at the first snapshot."""
    count: int = 0
    """How many are kept."""
    sizes: SnapshotSizes = SnapshotSizes(0, 0)

    def due(self, step: int) -> bool:
        """Whether one is taken before this step's update."""
        if self.place == "nowhere" or not self.memory:
            return False
        return not self.kept or step >= self.kept[-1].step + self.every

    def choose(self, model: nn.Module, optimizer: Optimizer) -> str:
        """Choose where snapshots go by their size; return the choice in one line."""
        self.sizes = size = sizes_of(model, optimizer)
        self.count = min(KEPT, int(self.memory * GB // max(1, size.memory)))
        self.place = "in memory"
        room = 0.0 if self.folder is None else FREE * _free(self.folder)
        if self.count < 2:
            self.count = min(KEPT, int(room // max(1, size.file)))
            self.place = "on disk"
        if self.count < 2:
            self.count, self.place = 0, "nowhere"
            return (
                f"no roll-back: a snapshot has {_gb(size.memory)}, memory= allows "
                f"{self.memory:g} GB, and half of the free disk is {_gb(room)}"
            )
        one = size.memory if self.place == "in memory" else size.file
        return f"roll-back: {self.count} snapshots of {_gb(one)}, {self.place}"

    def take(self, step: int, model: nn.Module, optimizer: Optimizer) -> str:
        """Take one, and drop the oldest but the first; return a line of news, if any.

        A disk that has become full ends it: what is kept stays.
        """
        news = "" if self.place else self.choose(model, optimizer)
        if self.place == "nowhere":
            return news
        # First: what is dropped makes room for what comes.
        while len(self.kept) >= self.count:
            del self.kept[min(1, len(self.kept) - 1)]
        try:
            copy = self._copy(model, optimizer)
            self.kept.append(take(step, model, optimizer, copy))
        # RuntimeError: torch's, where a file cannot be mapped.
        except (OSError, RuntimeError) as error:
            self.place = "nowhere"
            why = getattr(error, "strerror", None) or str(error).splitlines()[0]
            return f"no more snapshots: {why}; {len(self.kept)} are kept"
        return news

    def _copy(self, model: nn.Module, optimizer: Optimizer) -> Copy:
        if self.place == "in memory" or self.folder is None:
            return in_memory
        # Now: moments may have come since the first one.
        return File(self.folder, sizes_of(model, optimizer).file).copy

    def forget_after(self, step: int) -> None:
        """Drop what came after a step that the run went back to."""
        self.kept = [s for s in self.kept if s.step <= step]


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _gb(size: float) -> str:
    return f"{size / GB:.2g} GB" if size >= GB / 100 else f"{size / 1e6:.2g} MB"
