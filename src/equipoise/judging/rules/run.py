"""The run: its loss, readings that stop, and ranks that disagree."""

import math
from collections import deque
from dataclasses import dataclass, field

from equipoise.judging.history import Curve, History
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
    """Smoothed loss over ln V, or over where the run began if V is not known."""
    curve = history.curve("loss")
    if curve.count < START:
        return None
    found = history.memory("loss.above_chance", lambda: reference_loss(history))
    if found is None or found[0] <= 0:
        return None
    (reference, what), loss = found, curve.smoothed(SMOOTH)
    return measured(loss / reference, loss=loss, reference=reference, what=what)


FEW, AT_CHANCE = 64, 0.99
"""Classes below which the best loss may be near ln V, and the share of it that is no
better than a guess; 0.55 ln V is what knowing only frequencies gives on text."""


@dataclass(slots=True)
class Progress:
    """The last block that brought the loss down, looked for once per block."""

    blocks: int = 0
    found: Measured | None = None


@measures("loss.not_falling")
def not_falling(history: History) -> Measured | None:
    """Share of the run without progress, while the loss is above 0.55 ln V.

    A plateau far below ln V is convergence, and no trouble; of few classes only one at
    ln V itself is. A loss that does not begin near ln V is not judged against it.
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
        seen.found = _without_progress(curve, uniform)
    return seen.found if isinstance(seen.found, Measured) else None


def _without_progress(curve: Curve, uniform: float) -> Measured:
    """Progress: the mean of four blocks falls by 1 % of ln V below the best before."""
    means = [mean for _, mean in curve.blocks]
    best, last = math.inf, 0
    for i in range(3, len(means)):
        wide = sum(means[i - 3 : i + 1]) / 4
        if wide < best - 0.01 * uniform:
            best, last = wide, i
    loss, since = curve.smoothed(SMOOTH), curve.blocks[last][0]
    share = 1 - since / max(1, curve.steps[-1])
    few = uniform < math.log(FEW)
    value = share if loss > (AT_CHANCE if few else 0.55) * uniform else 0.0
    return measured(value, loss=loss, reference=uniform, since_step=since)


@measures("loss.risen")
def risen(history: History) -> Measured | None:
    """How far the smoothed loss is above its best block, in units of its noise.

    A loss that has come down by a quarter of its rise (new data) is on its way back.
    """
    curve = history.curve("loss")
    if curve.count < START or len(curve.blocks) < 4:
        return None
    best, loss = curve.best, curve.smoothed(SMOOTH)
    noise = max(curve.noise / 4, 0.01 * abs(best))  # of a mean of 16
    returning = curve.peak - loss > (curve.peak - best) / 4
    value = 0.0 if returning else (loss - best) / noise
    return measured(value, loss=loss, best=best, peak=curve.peak)


SPIKES = "loss.spike_recovered"
KEPT = 256
"""Spikes whose steps are kept."""


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
    stayed: list[tuple[int, float, float]] = field(default_factory=list)
    """Step, loss before and at the jump, of the first few that did not come back."""


@measures(SPIKES)
def spike_recovered(history: History) -> Measured | None:
    """Reported at the first, second, fourth, … spike that came back in 48 steps."""
    curve = history.curve("loss")
    if curve.count < START:
        return None
    spike = history.memory(SPIKES, Spikes)
    step, now = curve.steps[-1], curve.values[-1]
    if spike.began < 0:
        _watch_for(spike, curve)
        return None
    spike.highest = max(spike.highest, now)
    if step - spike.began > START:
        if len(spike.stayed) < 8:
            spike.stayed.append((spike.began, spike.before, spike.first))
        spike.began = -1  # this one stays: loss.risen
    elif now <= spike.usual:
        began, spike.began = spike.began, -1
        spike.recovered += 1
        spike.came_back.append(began)
        if spike.recovered & (spike.recovered - 1) == 0:
            count, highest = spike.recovered, spike.highest
            return measured(
                1.0, began=began, highest=highest, usual=spike.usual, count=count
            )
    return None


def _watch_for(spike: Spikes, curve: Curve) -> None:
    now, usual = curve.values[-1], curve.usual
    if now > usual + max(6 * curve.deviation, 0.05 * abs(usual)):
        spike.began, spike.highest = curve.steps[-1], now
        spike.before, spike.first = usual, now
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
