"""Gathers what probes emit during a step, and moves it off the device once.

Scalars of every step, left on their device until there are enough to move at once.

A step costs a few Python operations here: no transfer, no wait, no write.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.probes.capture import How
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


MOST_STEPS = 64
LONGEST_S = 2.0
"""How stale the run file may get while training goes on."""

NORM, NORM_PART = "gradient.norm.total", "gradient.norm.part"
"""The norm that clips, and this rank's part of it where FSDP shards the gradient."""

Entry = tuple[int, str, float]


@dataclass(slots=True)
class Light:
    """Scalars of steps not yet written."""

    _pending: list[tuple[int, str, Tensor | float]] = field(default_factory=list)
    _first_step: int = 0
    _since: float = field(default_factory=time.monotonic)

    def add(self, step: int, name: str, value: Tensor | float) -> None:
        if not self._pending:
            self._first_step, self._since = step, time.monotonic()
        value = value.detach() if isinstance(value, Tensor) else float(value)
        self._pending.append((step, name, value))

    @property
    def due(self) -> bool:
        """Whether enough has gathered to be worth a transfer and a commit."""
        if not self._pending:
            return False
        many = self._pending[-1][0] - self._first_step >= MOST_STEPS
        return many or time.monotonic() - self._since >= LONGEST_S

    def taken(self) -> list[Entry]:
        """Return everything gathered as host numbers, and start afresh."""
        pending, self._pending = self._pending, []
        moved = iter(
            _scalars_moved([v for _, _, v in pending if isinstance(v, Tensor)])
        )
        return [
            (step, name, next(moved) if isinstance(value, Tensor) else value)
            for step, name, value in pending
        ]


def scalar_readings(entries: Iterable[Entry]) -> list[Reading]:
    """Return one reading per scalar and step; what was said last counts."""
    last = {(step, name): value for step, name, value in entries}
    return [Reading.scalar(step, name, value) for (step, name), value in last.items()]


def _scalars_moved(scalars: list[Tensor]) -> list[float]:
    """Return the numbers of many scalars with one transfer per device."""
    out = [0.0] * len(scalars)
    for device in {t.device for t in scalars}:
        here = [i for i, t in enumerate(scalars) if t.device == device]
        packed = torch.stack([scalars[i].reshape(()).to(torch.float64) for i in here])
        for i, number in zip(here, packed.cpu().tolist(), strict=True):
            out[i] = number
    return out
