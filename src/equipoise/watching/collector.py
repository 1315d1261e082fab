"""Gathers what probes emit during a step, and moves it off the device once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.probes.emission import How
from equipoise.records import Reading


@dataclass(frozen=True, slots=True)
class Cell:
    """The values of one quantity at one site, on the host."""

    values: tuple[float, ...]
    how: How
    first: int = 0
    """Which head the first value is of: tensor parallelism gives a rank some heads."""


Table = dict[str, dict[str, Cell]]
"""quantity → site → values."""


@dataclass(slots=True)
class _Held:
    values: Tensor
    how: How
    by_head: bool
    count: int = 1


class Collector:
    """Holds small tensors by (quantity, site), in the order they were first heard."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], _Held] = {}

    def __call__(
        self, site: str, quantity: str, values: Tensor, *, how: How = "last"
    ) -> None:
        new = values.detach().reshape(-1)
        old = self._held.get((quantity, site))
        if old is None:
            self._held[quantity, site] = _Held(new, how, values.ndim > 0)
            return
        old.values, old.count = _combined(old, new), old.count + 1

    def taken(self, first_heads: Mapping[str, int] | None = None) -> Table:
        """Return everything collected, with one transfer, and start afresh.

        ``first_heads`` names the sites of which this rank holds later heads only.
        """
        firsts = first_heads or {}
        held, self._held = self._held, {}
        moved = _moved([cell.values for cell in held.values()])
        table: Table = {}
        for ((quantity, site), cell), values in zip(held.items(), moved, strict=True):
            first = firsts.get(site, 0) if cell.by_head else 0
            table.setdefault(quantity, {})[site] = Cell(values, cell.how, first)
        return table


def as_readings(step: int, table: Table) -> list[Reading]:
    """Return one reading per quantity."""
    return [
        Reading(
            step=step,
            quantity=quantity,
            sites=tuple(sites),
            values=tuple(cell.values for cell in sites.values()),
        )
        for quantity, sites in table.items()
    ]


def _combined(old: _Held, new: Tensor) -> Tensor:
    """Return two samples of one step as one."""
    if old.how == "max":
        return torch.maximum(old.values, new)
    if old.how == "min":
        return torch.minimum(old.values, new)
    if old.how == "sum":
        return old.values + new
    if old.how == "mean":
        return old.values + (new - old.values) / (old.count + 1)
    return new


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
