"""What a rank holds of a reading, its share of a norm, and how numbers leave the rank.

Numbers travel to the host with one copy per device, and nothing waits for it. A GPU
copies to pinned memory on its own, behind an event. The training goes on; who asks for
the numbers waits until the event has happened. On the CPU there is no copy.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.anatomy.sharding import Split, is_dtensor, local_part
from equipoise.anatomy.sites import Anatomy

_PLAIN = (Tensor, nn.Parameter)
_WIDE = (torch.float32, torch.float64)
LATE_DEVICES = {"cuda"}
"""Kinds of devices that copy to the host on their own, while the training goes on."""


class Shard(NamedTuple):
    """Numbers of one rank, and which part of the total they are."""

    values: Tensor
    """Float32 and on the host once it has arrived there."""
    split: Split


Parts = Mapping[str, Shard]
"""What it is a part of → the part."""


@dataclass(slots=True)
class PendingParts:
    """This rank's parts until the ranks' next exchange."""

    _parts: dict[str, Shard] = field(default_factory=dict)

    def add(self, name: str, values: Tensor, split: Split) -> None:
        self._parts[name] = Shard(values, split)

    def pop(self) -> Parts:
        """Return the parts since the last call, where they are."""
        parts, self._parts = self._parts, {}
        return parts


@dataclass(slots=True, kw_only=True)
class PartsProbe:
    """For probes whose parts are what they met in the pass: no rank is asked."""

    _parts: PendingParts = field(default_factory=PendingParts)

    def begin(self, anatomy: Anatomy) -> int:
        return 0

    def parts(self) -> Parts:
        return self._parts.pop()


def parts_by_rank(ranks: Sequence[Parts], name: str) -> list[list[Tensor]]:
    """Return each copy of one thing as its parts in order; none that is incomplete.

    Ranks that hold the same part (data parallel) are in the order of their number, so
    the first of every part belong together: the ranks of a mesh are sorted alike.
    """
    known = [parts[name] for parts in ranks if name in parts]
    counts = {part.split.parts for part in known}
    if len(counts) != 1:
        return []
    by_part: list[list[Tensor]] = [[] for _ in range(counts.pop())]
    for part in known:
        by_part[part.split.part].append(part.values)
    return [list(copy) for copy in zip(*by_part, strict=False)]


def names(ranks: Sequence[Parts]) -> list[str]:
    """Return what any rank holds a part of, in the order of first mention."""
    return list(dict.fromkeys(name for parts in ranks for name in parts))


def copy_count(x: Tensor, ranks: int) -> int:
    """Return how many of the ranks hold this very part, or this very summand."""
    if not is_dtensor(x):
        return ranks
    sizes = zip(x.device_mesh.shape, x.placements, strict=True)
    apart = (n for n, p in sizes if not p.is_replicate())
    return max(1, ranks // prod(apart))


def share(x: Tensor, ranks: int, like: Tensor | None = None) -> Tensor:
    """Return this rank's share of ‖x‖₂: squares of all ranks' shares add up to ‖x‖²."""
    part = local_part(x.detach())
    wide = torch.promote_types(part.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(part, dtype=wide)
    copies = copy_count(x if like is None else like, ranks)
    return norm if copies == 1 else norm * copies**-0.5


def shares(tensors: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Return the ``share`` of each, on the CPU in one call for all."""
    if not all(type(x) in _PLAIN and x.is_cpu and x.dtype in _WIDE for x in tensors):
        return [share(x, ranks) for x in tensors]
    norms = torch._foreach_norm([x.detach() for x in tensors]) if tensors else ()
    return [norm if ranks == 1 else norm * ranks**-0.5 for norm in norms]


def is_partial(x: Tensor) -> bool:
    """Return whether the ranks hold summands, and none the sum: FSDP's total norm."""
    return is_dtensor(x) and any(p.is_partial() for p in x.placements)


class Transfer:
    """The numbers of many small tensors on their way, with one copy per device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sizes = [t.numel() for t in tensors]
        self._copies: list[tuple[list[int], Tensor, Any]] = []
        for device in {t.device for t in tensors}:
            here = [i for i, t in enumerate(tensors) if t.device == device]
            packed = torch.cat([_float(tensors[i]).reshape(-1) for i in here])
            self._copies.append((here, *start_copy(packed)))

    @property
    def arrived(self) -> bool:
        return all(event is None or event.query() for _, _, event in self._copies)

    def numbers(self, count: int | None = None) -> list[tuple[float, ...]]:
        """Return the numbers of each tensor, or of the first; wait for them."""
        sizes = self._sizes[:count]
        out: list[tuple[float, ...]] = [()] * len(sizes)
        for here, packed in self._waited():
            wanted, begin = [i for i in here if i < len(sizes)], 0
            numbers = packed[: sum(sizes[i] for i in wanted)].tolist()
            for i in wanted:
                end = begin + sizes[i]
                out[i], begin = tuple(numbers[begin:end]), end
        return out

    def tensors(self, first: int) -> list[Tensor]:
        """Return the tensors from one on, flat, float32, on the host; wait for them."""
        out = [torch.empty(0)] * len(self._sizes)
        for here, packed in self._waited():
            each = packed.split([self._sizes[i] for i in here])
            for i, values in zip(here, each, strict=True):
                out[i] = values.float() if i >= first else out[i]
        return out[first:]

    def _waited(self) -> Iterator[tuple[list[int], Tensor]]:
        for here, packed, event in self._copies:
            if event is not None:
                event.synchronize()
            yield here, packed


def start_copy(packed: Tensor) -> tuple[Tensor, Any]:
    """Return where numbers will be, and the event after which they are there.

    To pinned memory a GPU copies on its own; elsewhere reading the numbers waits.
    """
    if packed.device.type not in LATE_DEVICES:
        return packed, None
    pinned = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    pinned.copy_(packed, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(packed.device))
    return pinned, event


def copies_late(model: nn.Module) -> bool:
    """Return whether what is read of a model arrives on the host while it trains on."""
    return any(p.device.type in LATE_DEVICES for p in model.parameters())


def _float(x: Tensor) -> Tensor:
    """Return what can be joined with others without loss: floats widen, counts not."""
    return x if x.is_floating_point() else x.to(torch.float64)
