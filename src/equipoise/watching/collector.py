"""Gathers what probes emit during a step, and moves it off the device once."""

from collections.abc import Iterable

import torch
from torch import Tensor

from equipoise.probes.emission import How
from equipoise.records import Reading


class Collector:
    """Holds small tensors by (quantity, site), in the order they were first heard."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Tensor]] = {}

    def __call__(
        self, site: str, quantity: str, values: Tensor, *, how: How = "last"
    ) -> None:
        sites = self._values.setdefault(quantity, {})
        old = sites.get(site)
        new = values.detach().reshape(-1)
        sites[site] = new if old is None else _combined(old, new, how)

    def readings(self, step: int) -> list[Reading]:
        """Return everything collected as readings of one step, and start afresh."""
        values, self._values = self._values, {}
        flat = [v for sites in values.values() for v in sites.values()]
        numbers = iter(_moved(flat))
        return [
            Reading(
                step=step,
                quantity=quantity,
                sites=tuple(sites),
                values=tuple(next(numbers) for _ in sites),
            )
            for quantity, sites in values.items()
        ]


def _combined(old: Tensor, new: Tensor, how: How) -> Tensor:
    """Return two samples of one step as one."""
    if how == "max":
        return torch.maximum(old, new)
    if how == "min":
        return torch.minimum(old, new)
    return old + new if how == "sum" else new


def _moved(tensors: Iterable[Tensor]) -> list[tuple[float, ...]]:
    """Return the numbers of many small tensors with one transfer per device."""
    tensors = list(tensors)
    out: list[tuple[float, ...]] = [()] * len(tensors)
    for device in {t.device for t in tensors}:
        here = [i for i, t in enumerate(tensors) if t.device == device]
        packed = torch.cat([tensors[i].to(torch.float64) for i in here])
        parts = torch.split(packed.cpu(), [tensors[i].numel() for i in here])
        for i, part in zip(here, parts, strict=True):
            out[i] = tuple(part.tolist())
    return out
