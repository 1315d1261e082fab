"""Numbers on their way to the host: one copy per device, and nothing waits for it.

A GPU copies to pinned memory on its own, behind an event. The training goes on; who
asks for the numbers waits until the event has happened. On the CPU there is no copy.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LATE_DEVICES = {"cuda"}
"""Kinds of devices that copy to the host on their own, while the training goes on."""


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
