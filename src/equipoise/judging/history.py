"""What a run has read so far, as rules see it: causal, bounded in memory, torch-free.

Readings are added one by one in the order they were recorded, live or from a file, and
a rule looks only at what has been added. Of each quantity the first and the latest
readings are kept; of a scalar also its whole course, in at most 256 blocks. A run that
goes back to an earlier step (resumed from a checkpoint) forgets what came after it.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

from equipoise.records import Finding, Reading

FIRST, RECENT = 16, 64
"""Readings of each quantity that are kept from the start, and from now back."""
BLOCK, MOST_BLOCKS = 8, 256
"""Values a block of a curve begins with, and blocks before two become one."""

SAMPLED = {"attention.max_logit.sampled": "attention.max_logit"}
"""What is read of a sample of rows, and the quantity that rules judge it as."""


def canonical(reading: Reading) -> Reading:
    """Return a reading under the name that rules know."""
    name = SAMPLED.get(reading.quantity)
    return reading if name is None else replace(reading, quantity=name)


class RecordBatch(Protocol):
    """Readings and findings of a run, in the order of recording."""

    @property
    def readings(self) -> Sequence[Reading]: ...

    @property
    def findings(self) -> Sequence[Finding]: ...


@dataclass(slots=True)
class Curve:
    """A scalar over the whole run: means of blocks that widen as the run grows.

    What takes a pass over the latest values (median, noise) is brought up to date once
    in eight values, and only where a rule asks: a training step must not wait for
    statistics.
    """

    blocks: list[tuple[int, float]] = field(default_factory=list)
    """First step and mean of each full block, oldest first."""
    size: int = BLOCK
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    """The latest values, and their steps; once there are 64, never fewer."""
    count: int = 0
    best: float = math.inf
    """The lowest mean of a block."""
    peak: float = -math.inf
    """The highest mean of a block since the lowest."""
    largest: float = -math.inf
    largest_step: int = -1
    """The largest value, and the first step that had it."""
    _open: list[tuple[int, float]] = field(default_factory=list)
    _measured: tuple[float, float, float] = (math.nan, math.inf, math.inf)
    _stale: bool = False

    def add(self, step: int, value: float) -> None:
        if self.steps and step <= self.steps[-1]:
            self._forget(step)
        self.steps.append(step)
        self.values.append(value)
        self.count += 1
        if value > self.largest:
            self.largest, self.largest_step = value, step
        self._open.append((step, value))
        if len(self._open) >= self.size:
            self._close_block()
        if self.count % BLOCK == 0:
            self._stale = True
        if len(self.values) >= 4 * RECENT:
            del self.values[:-RECENT], self.steps[:-RECENT]

    def tail(self, count: int) -> list[float]:
        """Return the latest values, at most so many, oldest first."""
        return self.values[-count:]

    def smoothed(self, count: int = 16) -> float:
        """Return the mean of the latest values; NaN of none."""
        values = self.values[-count:]
        return sum(values) / len(values) if values else math.nan

    def _close_block(self) -> None:
        mean = sum(value for _, value in self._open) / len(self._open)
        self.blocks.append((self._open[0][0], mean))
        lowest = mean < self.best
        self.best = mean if lowest else self.best
        self.peak = mean if lowest else max(self.peak, mean)
        self._open = []
        if len(self.blocks) == MOST_BLOCKS:
            pairs = zip(self.blocks[::2], self.blocks[1::2], strict=True)
            self.blocks = [(a[0], (a[1] + b[1]) / 2) for a, b in pairs]
            self.size *= 2

    @property
    def usual(self) -> float:
        """The median of the latest 64."""
        return self._statistics()[0]

    @property
    def deviation(self) -> float:
        """The median distance from ``usual``, scaled to a Gaussian's deviation."""
        return self._statistics()[1]

    @property
    def noise(self) -> float:
        """The median step between neighbours: for independent noise about its σ."""
        return self._statistics()[2]

    def _statistics(self) -> tuple[float, float, float]:
        if self._stale:
            self._stale = False
            latest = finite(self.values[-RECENT:])
            self._measured = _spread(latest) if len(latest) >= 4 else self._measured
        return self._measured

    def _forget(self, step: int) -> None:
        """Drop everything from ``step`` on: the run went back to it."""
        kept = sum(1 for known in self.steps if known < step)
        del self.steps[kept:], self.values[kept:]
        self.blocks = [block for block in self.blocks if block[0] < step]
        means = [mean for _, mean in self.blocks]
        self.best = min(means, default=math.inf)
        self.peak = max(means[means.index(self.best) :]) if means else -math.inf
        self._open = [pair for pair in self._open if pair[0] < step]


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, scaled median distance from it, and median step."""
    usual = median(values)
    steps = [abs(b - a) for a, b in pairwise(values)]
    deviation = 1.4826 * median([abs(value - usual) for value in values])
    return usual, deviation, median(steps)


@dataclass(slots=True)
class Track:
    """The readings of one quantity: the first few, the latest, and how many."""

    first: list[Reading] = field(default_factory=list)
    recent: deque[Reading] = field(default_factory=lambda: deque(maxlen=RECENT))
    count: int = 0
    step: int = -1
    """Of the latest reading; -1 of none."""

    def add(self, reading: Reading) -> None:
        if self.recent and reading.step <= self.step:
            self._forget(reading.step)
        if len(self.first) < FIRST:
            self.first.append(reading)
        self.recent.append(reading)
        self.count += 1
        self.step = reading.step

    def _forget(self, step: int) -> None:
        self.first = [r for r in self.first if r.step < step]
        self.recent = deque((r for r in self.recent if r.step < step), maxlen=RECENT)
        self.count = max(len(self.first), len(self.recent))


@dataclass(slots=True)
class History:
    """Everything a rule may look at."""

    details: Mapping[str, Any] = field(default_factory=dict)
    """What the run says of itself: blocks, attention sites, classes of the output."""
    step: int = -1
    """The step of the reading that was added last."""
    first_step: int = -1
    """The step of the first reading."""
    sampled: int = 0
    """Steps with readings of the model, not only with the loop's scalars."""
    _tracks: dict[str, Track] = field(default_factory=dict)
    _curves: dict[str, Curve] = field(default_factory=dict)
    _memory: dict[str, Any] = field(default_factory=dict)
    _last_sample: int = -1

    def add(self, reading: Reading) -> bool:
        """Take a reading; return whether it says anything new.

        Of a quantity that is read of some sites whole and of others by a sample, the
        first of a step's two readings waits for the other.
        """
        self.step = reading.step
        if self.first_step < 0:
            self.first_step = reading.step
        track = self._tracks.get(reading.quantity)
        if track is None:
            track = self._tracks[reading.quantity] = Track()
        known = track.recent[-1] if track.recent else reading
        in_parts = reading.quantity in SAMPLED.values()
        if track.step == reading.step:
            reading = joined(known, reading) if in_parts else reading
            if known == reading:
                return False  # a scalar that the loop gave after the step was written
        if reading.sites == ("",):
            value = reading.values[0][0] if reading.values[0] else math.nan
            self.curve(reading.quantity).add(reading.step, value)
        else:
            self.count_sample(reading.step)
        track.add(reading)
        return not in_parts or len(reading.sites) >= len(known.sites)

    def count_sample(self, step: int) -> None:
        """Count a step at which the model was read."""
        if step != self._last_sample:
            self.sampled += 1
            self._last_sample = step

    def __contains__(self, quantity: str) -> bool:
        return quantity in self._tracks

    def curve(self, quantity: str) -> Curve:
        """Return the course of a scalar; empty if it was never read."""
        found = self._curves.get(quantity)
        if found is None:
            found = self._curves[quantity] = Curve()
        return found

    def track(self, quantity: str) -> Track:
        """Return the kept readings of a quantity; empty if it was never read."""
        return self._tracks.get(quantity) or Track()

    def last(self, quantity: str) -> Reading | None:
        """Return the latest reading of a quantity."""
        track = self._tracks.get(quantity)
        return track.recent[-1] if track is not None and track.recent else None

    def table(self, quantity: str) -> dict[str, tuple[float, ...]]:
        """Return the latest values by site; empty if it was never read."""
        reading = self.last(quantity)
        return {} if reading is None else dict(by_site(reading))

    def scalar(self, quantity: str) -> float | None:
        """Return the latest value of a quantity of the model as a whole."""
        reading = self.last(quantity)
        return reading.values[0][0] if reading is not None else None

    def last_step(self, quantity: str) -> int | None:
        track = self._tracks.get(quantity)
        return None if track is None or not track.recent else track.step

    def memory(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what a rule keeps from one reading to the next, made on first use."""
        if name not in self._memory:
            self._memory[name] = make()
        return self._memory[name]

    def recall(self, name: str) -> Any:
        """Return what a rule has kept; None before its first use."""
        return self._memory.get(name)

    @property
    def blocks(self) -> Sequence[str]:
        """The model's blocks in order, where the run names them."""
        return tuple(self.details.get("blocks") or ())

    @property
    def is_continued(self) -> bool:
        """Whether the run began with a trained model: a first loss far below ln V."""
        losses = self.track("loss").first
        return bool(losses) and is_trained(losses[0].values[0][0], self.details)

    @property
    def quantities(self) -> tuple[str, ...]:
        return tuple(self._tracks)


def joined(earlier: Reading, later: Reading) -> Reading:
    """Return the readings of one step as one, the later where both have a site."""
    both = {**dict(by_site(earlier)), **dict(by_site(later))}
    return replace(later, sites=tuple(both), values=tuple(both.values()))


def is_trained(loss: float, details: Mapping[str, Any]) -> bool:
    """Return whether a first loss is far below ln V, where V is known."""
    classes = details.get("classes")
    if not isinstance(classes, int) or classes < 2:
        return False
    return loss < 0.7 * math.log(classes)


def by_site(reading: Reading) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield each site with its values."""
    return zip(reading.sites, reading.values, strict=True)


def finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
