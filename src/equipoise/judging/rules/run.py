"""The run: its loss, readings that stop, and ranks that disagree."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from equipoise.judging.history import BLOCK, Curve, History, finite
from equipoise.judging.rules.registry import Measured, measured, measures

START = 48
"""Steps before which the loss is not judged: warm-up."""
SMOOTH = 16
REGULAR = ("attention.theta.p50", "gradient.norm")
"""Quantities that every preset reads at every sample."""
LATE = 64
"""Steps by which a reading may be late beside ten of its own intervals."""
PRESENT = measured(0.0, what="", last=0, now=0)
"""Found at almost every step, so made once."""


def uniform_loss(history: History) -> float | None:
    """Return ln V where the run says how many classes its output has."""
    classes = history.details.get("classes")
    return math.log(classes) if isinstance(classes, int) and classes > 1 else None


def reference_loss(history: History) -> tuple[float, str] | None:
    """Return the loss of a model that knows nothing, and what that is in words.

    ln V, where the run says how many classes its output has, or where the loss began if
    that is above. A first loss far above ln V is not a plain mean cross-entropy over V
    classes: then it is the reference itself, and one batch may be easier than the next,
    so a fifth more.
    """
    began, uniform = first_loss(history), uniform_loss(history)
    if began is None:
        return None
    if uniform is not None and began <= PLAIN * uniform:
        return max(uniform, began), "what guessing gives"
    return 1.2 * began, "well above where it began"


PLAIN = 1.1
"""First loss over ln V up to which a loss is taken for a plain mean cross-entropy: an
untrained model begins near ln V, a loss with an offset or a factor does not."""


def first_loss(history: History) -> float | None:
    """Return the first loss that was read."""
    first = history.track("loss").first
    return first[0].values[0][0] if first else None


@measures("loss.above_chance")
def above_chance(history: History) -> Measured | None:
    """Smoothed loss over ln V, or over where the run began if V is not known.

    A mean of 16 losses has the noise of its batches: three of its deviations count as
    none, so that a small batch at ln V is not above it.
    """
    curve = history.curve("loss")
    if curve.count < START:
        return None
    found = history.memory("loss.above_chance", lambda: reference_loss(history))
    if found is None or found[0] <= 0:
        return None
    (reference, what), loss = found, curve.smoothed(SMOOTH)
    noise = 3 * curve.noise / math.sqrt(SMOOTH) if curve.noise < math.inf else 0.0
    value = (loss - noise) / reference
    return measured(value, loss=loss, reference=reference, what=what)


AT_CHANCE = 0.99
"""Share of ln V up to which a loss is better than a guess. A plateau below it may be
the best loss there is: that of few classes, of a masked token, of text to a small
model."""


@dataclass(slots=True)
class Progress:
    """The last block that brought the loss down, looked for once per block."""

    blocks: int = 0
    found: Measured | None = None


@measures("loss.not_falling")
def not_falling(history: History) -> Measured | None:
    """Share of the run without progress, while the loss is what guessing gives.

    The run's length is counted in Σ rate, not in steps, so a warm-up is short; while
    the rate still rises nothing is said. A loss that does not begin near ln V is not
    judged against it.
    """
    curve, uniform = history.curve("loss"), uniform_loss(history)
    began = first_loss(history)
    if uniform is None or began is None or len(curve.blocks) < 24:
        return None
    if began > PLAIN * uniform:
        return None
    seen = history.memory("loss.not_falling", Progress)
    if seen.blocks != curve.count // curve.size:
        seen.blocks = curve.count // curve.size
        seen.found = _without_progress(history, curve, uniform)
    return seen.found if isinstance(seen.found, Measured) else None


def _without_progress(
    history: History, curve: Curve, uniform: float
) -> Measured | None:
    """Progress: the mean of four blocks falls by 1 % of ln V below the best before."""
    means = [mean for _, mean in curve.blocks]
    best, last = math.inf, 0
    for i in range(3, len(means)):
        wide = sum(means[i - 3 : i + 1]) / 4
        if wide < best - 0.01 * uniform:
            best, last = wide, i
    if warms_up(history):
        return None
    rates = history.curve("learning_rate").blocks or [(curve.blocks[0][0], 1.0)]
    time = TrainingTime(rates, curve.steps[-1])
    loss, since = curve.smoothed(SMOOTH), max(curve.blocks[last][0], time.risen)
    share = 1 - time.until(since) / max(time.until(curve.steps[-1]), 1e-300)
    value = share if loss > AT_CHANCE * uniform else 0.0
    return measured(value, loss=loss, reference=uniform, since_step=since)


class TrainingTime:
    """Σ rate up to a step: what a run has trained, in steps at a rate of 1.

    Where no rate is known, steps count alike from the run's first on.
    """

    def __init__(self, rates: Sequence[tuple[int, float]], step: int) -> None:
        self._rates, self._step = rates, step

    @property
    def risen(self) -> int:
        """The first step of the block in which the rate was highest first."""
        return max(self._rates, key=lambda block: block[1])[0]

    def until(self, step: int) -> float:
        """Return Σ rate of the steps before this one."""
        ends = [*(first for first, _ in self._rates[1:]), max(self._step, step)]
        return sum(
            rate * (min(end, step) - first)
            for (first, rate), end in zip(self._rates, ends, strict=True)
            if first < step
        )


def warms_up(history: History) -> bool:
    """Whether the rate is still rising: its latest block is the highest."""
    rates = history.curve("learning_rate").blocks
    return len(rates) > 1 and rates[-1][1] > max(rate for _, rate in rates[:-1])


def learnt(history: History) -> float:
    """Return how far the loss has come down from its first value, at least 0."""
    began, best = first_loss(history), history.curve("loss").best
    return max(0.0, began - best) if began is not None and best < math.inf else 0.0


@dataclass(slots=True)
class Lowest:
    """The lowest mean of a block, and the noise of the loss at that time."""

    best: float = math.inf
    noise: float = math.inf


@measures("loss.risen")
def risen(history: History) -> Measured | None:
    """How far the smoothed loss is above its best block, in units of its noise.

    The noise is that of the best time, for bad batches among good ones are noise too;
    it is at least 1 % of what was learnt so far, where an offset does not count. A loss
    that has come down by a quarter of its rise (new data) is on its way back.
    """
    curve = history.curve("loss")
    if curve.count < START or len(curve.blocks) < 4:
        return None
    lowest = history.memory("loss.risen", Lowest)
    if curve.best != lowest.best or not lowest.noise < math.inf:
        lowest.best, lowest.noise = curve.best, curve.noise
    best, loss = curve.best, curve.smoothed(SMOOTH)
    # The noise of a mean of 16.
    noise = max(lowest.noise / 4, 0.01 * learnt(history), 1e-12)
    value = (loss - best) / noise
    if value > 0 and _returns(curve, loss, best):
        value = 0.0
    return measured(value, loss=loss, best=best, peak=curve.peak)


def _returns(curve: Curve, loss: float, best: float) -> bool:
    """Whether a quarter of the rise has come back.

    The highest of many means of eight is high by chance too: three of its deviations.
    """
    latest = finite(curve.tail(SMOOTH)) or [0.0]
    mean = sum(latest) / len(latest)
    spread = math.sqrt(sum((value - mean) ** 2 for value in latest) / len(latest))
    peak = curve.peak - 3 * spread / math.sqrt(BLOCK)
    return peak - loss > (peak - best) / 4


SPIKES = "loss.spike_recovered"
KEPT = 256
"""Spikes whose steps are kept."""


class Jump(NamedTuple):
    """A loss that went up in one step."""

    step: int
    before: float
    after: float
    highest: float


@dataclass(slots=True)
class Spikes:
    """A jump of the loss under way, which have come back, and which stayed."""

    began: int = -1
    usual: float = math.nan
    before: float = math.nan
    first: float = math.nan
    """The usual loss before the jump, and the loss at its first step."""
    highest: float = -math.inf
    recovered: int = 0
    came_back: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    of_batches: deque[Jump] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Those that were up and down in one step each, as no weights go."""
    stayed: list[Jump] = field(default_factory=list)
    """The first few that did not come back."""

    @property
    def jump(self) -> Jump:
        """The one under way."""
        return Jump(self.began, self.before, self.first, self.highest)


@measures(SPIKES)
def spike_recovered(history: History) -> Measured | None:
    """Reported at the first, second, fourth, … spike that came back in 48 steps."""
    curve = history.curve("loss")
    if curve.count < START:
        return None
    spike = history.memory(SPIKES, Spikes)
    step, now, last = curve.steps[-1], curve.values[-1], curve.values[-2]
    if spike.began < 0:
        _watch_for(spike, curve, learnt(history))
        return None
    spike.highest = max(spike.highest, now)
    if step - spike.began > START:
        if len(spike.stayed) < 8:
            spike.stayed.append(spike.jump)
        spike.began = -1  # this one stays: loss.risen
    elif now <= spike.usual:
        half = (spike.highest - spike.before) / 2
        if min(spike.first - spike.before, last - now) > half:
            spike.of_batches.append(spike.jump)
        began, spike.began = spike.began, -1
        spike.recovered += 1
        spike.came_back.append(began)
        if spike.recovered & (spike.recovered - 1) == 0:
            count, highest = spike.recovered, spike.highest
            return measured(
                1.0, began=began, highest=highest, usual=spike.usual, count=count
            )
    return None


def _watch_for(spike: Spikes, curve: Curve, learnt: float) -> None:
    """Note a jump: far out of all that is usual, or out of noise and in one step."""
    *before, now = curve.tail(BLOCK + 1)
    usual, recent = curve.usual, sum(before) / len(before)
    rise, step = now - recent, now - before[-1]
    at_once = 2 * step > rise > max(6 * curve.noise, learnt / 4, 1e-12)
    if at_once or now > usual + max(6 * curve.deviation, 0.05 * learnt):
        spike.began, spike.highest = curve.steps[-1], now
        spike.before, spike.first = recent if at_once else usual, now
        spike.usual = usual + curve.deviation


@measures("coverage.stopped")
def stopped(history: History) -> Measured | None:
    """1 where a reading is overdue by ten of its own intervals."""
    for quantity in REGULAR:
        track = history.track(quantity)
        if history.step - track.step <= LATE or len(track.recent) < 3:
            continue
        last, before = track.recent[-1].step, track.recent[-2].step
        if history.step - last > 10 * max(1, last - before) + LATE:
            return measured(1.0, what=quantity, last=last, now=history.step)
    return PRESENT


@measures("ranks.disagree")
def disagree(history: History) -> Measured | None:
    """Largest relative difference between ranks of a replicated weight's norm."""
    value = history.scalar("ranks.disagreement")
    return None if value is None else measured(value)
