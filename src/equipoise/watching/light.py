"""Scalars of every step, left on their device until there are enough to move at once.

A step costs a few Python operations here: no transfer, no wait, no write.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.records import Reading

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
        moved = iter(_moved([v for _, _, v in pending if isinstance(v, Tensor)]))
        return [
            (step, name, next(moved) if isinstance(value, Tensor) else value)
            for step, name, value in pending
        ]


def as_readings(entries: Iterable[Entry]) -> list[Reading]:
    """Return one reading per scalar and step; what was said last counts."""
    last = {(step, name): value for step, name, value in entries}
    return [Reading.scalar(step, name, value) for (step, name), value in last.items()]


def _moved(scalars: list[Tensor]) -> list[float]:
    """Return the numbers of many scalars with one transfer per device."""
    out = [0.0] * len(scalars)
    for device in {t.device for t in scalars}:
        here = [i for i, t in enumerate(scalars) if t.device == device]
        packed = torch.stack([scalars[i].reshape(()).to(torch.float64) for i in here])
        for i, number in zip(here, packed.cpu().tolist(), strict=True):
            out[i] = number
    return out
