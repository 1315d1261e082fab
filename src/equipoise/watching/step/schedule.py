"""Which steps are sampled, and what that costs.

Steps are counted, never timed: all ranks sample the same steps, and a checkpoint can
carry the counter. The cost is in CPU seconds of the thread that trains.
"""

import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from equipoise.errors import InputError

FIRST_STEPS = (1, 2, 5, 8, 10, 15, 20, 25, 28)
"""Sampled after step 0 whatever the interval: most mistakes of a loop are decidable at
the second sample, and a verdict takes ten."""


def extra_steps(every: int) -> list[int]:
    """Return the first steps that are sampled besides those of the interval.

    >>> extra_steps(10)
    [1, 2, 5, 8, 15, 25, 28]
    """
    return [step for step in FIRST_STEPS if step % every]


@dataclass(slots=True, kw_only=True)
class Schedule:
    """Samples every N steps, at named steps, and densely at the start."""

    every: int = 10
    at: Collection[int] = ()
    dense_start: bool = False
    """Whether ``FIRST_STEPS`` are sampled as well."""
    budget: float | None = None
    """Share of the training's time that sampling may take."""
    step: int = 0
    interval: int = field(init=False)
    next_due: int = field(init=False)

    def __post_init__(self) -> None:
        self.at = frozenset((*self.at, *(FIRST_STEPS if self.dense_start else ())))
        self.interval = self.every
        self.next_due = self.step

    @property
    def due(self) -> bool:
        """Whether the step under way is sampled."""
        return self.step >= self.next_due or self.step in self.at

    def advance(self) -> None:
        """End the step; after a sampled one the next is a whole interval away."""
        if self.step >= self.next_due:
            self.next_due = self.step + self.interval
        self.step += 1

    def continue_at(self, step: int) -> None:
        """Give the step under way a number; multiples of the interval are sampled."""
        self.step = step
        self.next_due = -(-step // self.interval) * self.interval

    def soon(self) -> None:
        """Sample the next step, whatever the interval: something has happened."""
        self.next_due = self.step + 1

    def adapt(self, *, cost: float, plain: float) -> int | None:
        """Return the new interval if the budget changes it, given seconds a step.

        A sample of cost c every n steps of p seconds takes the share c / (n p).
        """
        if self.budget is None or plain <= 0:
            return None
        wanted = max(self.every, math.ceil(cost / (self.budget * plain)))
        # Within a quarter it is noise: a wandering interval is of no use.
        if abs(wanted - self.interval) <= self.interval / 4:
            return None
        self.interval = wanted
        self.next_due = max(self.next_due, self.step + wanted)
        return wanted

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must carry for the phase to survive."""
        return {"step": self.step, "interval": self.interval, "next_due": self.next_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            step, interval, due = (int(state[name]) for name in self.state_dict())
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"no .state_dict() of a watch: {error!r}") from error
        self.step, self.interval, self.next_due = step, interval, due


SMOOTHING = 0.3


@dataclass(slots=True)
class Meter:
    """Splits a step's time into ours and the training's.

    Thread time, not wall time: a machine shared with others must not look like a
    slow probe. On an accelerator it counts what the host spends, launches included.
    """

    ours: float = 0.0
    """Of the step under way."""
    cost: float | None = None
    """Of a sampled step, smoothed."""
    plain: float | None = None
    """What a step takes without us, smoothed."""
    _began: float = field(default_factory=time.thread_time)
    _depth: int = 0
    _ours_since: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the block as ours; blocks inside it are counted once."""
        if self._depth == 0:
            self._ours_since = time.thread_time()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.ours += time.thread_time() - self._ours_since

    def end_step(self, *, sampled: bool) -> None:
        """Close the account of a step."""
        now = time.thread_time()
        if self._depth:  # the rest of the block is of the next step
            self.ours, self._ours_since = self.ours + now - self._ours_since, now
        total, self._began = max(now - self._began, 0.0), now
        ours, self.ours = self.ours, 0.0
        if sampled:
            self.cost = _smoothed(self.cost, ours)
        self.plain = _smoothed(self.plain, max(total - ours, 0.0))


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
