"""Settings of the training that were seen to move: what was read, never a guess.

Only a setting that is recorded as a reading can be seen: the learning rate at every
step, the other settings of the optimiser as they change. A setting that moved comes
before the symptoms that followed it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from equipoise.judging.history import Curve, History
from equipoise.records import Finding

RATE = "learning_rate"
AMOUNTS = ("optimizer.weight_decay", "optimizer.epsilon")
"""Settings of which more is more, by any factor."""
AVERAGES = ("optimizer.beta1", "optimizer.beta2", "optimizer.momentum")
"""Settings that average over 1/(1 − value) steps: that length is what moves."""
LOOP = ("loop.batch_size", "loop.clipping_limit", "loop.loss_scale")
"""Settings of the loop, recorded at sampled steps as they move."""
SETTINGS = (RATE, *AMOUNTS, *AVERAGES, *LOOP)
"""Quantities that the training script chooses and a run records."""
GREW, MOVED = "setting.grew", "setting.moved"
GROWN = 1.5
"""Growth of a setting, beyond all that was before, that is no warm-up any more."""
LEAP = 4.0
"""Growth between neighbouring blocks that no warm-up makes after its first three."""
CHANGED = 2.0
"""Factor in the length of an average that is a change."""
OTHER = 4.0
"""Factor in a setting of the loop that is a change: a last batch may be smaller."""
STOOD = 8
"""Steps a setting must have stood before a change of it is not a schedule."""
AFTER = 64
"""Steps after a setting is back by which a symptom may still begin."""
Point = tuple[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A setting that left everything it had been before."""

    setting: str
    since: int
    """The step from which on it moved."""
    until: int
    """The last step at which it is known to have been there."""
    now: float
    """The value farthest from what it had been."""
    peak: float
    """The largest value before, or the one it had stood at; and its step."""
    peak_step: int

    @property
    def grew(self) -> bool:
        """Whether it is told as a factor: an average, and what was 0, has none."""
        factors = RATE, *(name.removeprefix("optimizer.") for name in AMOUNTS)
        return self.setting in factors and self.peak > 0

    def finding(self, step: int) -> Finding:
        """Return it as a finding, as it stands at a step."""
        params = asdict(self)
        if not self.grew:
            of = {"case": "loop"} if f"loop.{self.setting}" in LOOP else {}
            return Finding.info(step, MOVED, **params, **of)
        over = {"case": "over"} if self.until < step - STOOD else {}
        return Finding.info(step, GREW, **params, times=self.now / self.peak, **over)


def growth(setting: str, curve: Curve) -> Moved | None:
    """Return since when a setting grew after it had stood, fallen, or leapt.

    A warm-up has nothing before it; a restart comes back to a rate that was there.

    >>> curve = Curve()
    >>> rates = [0.002] * 96 + [0.002 * 1.02**i for i in range(96)]
    >>> for step, rate in enumerate(rates): curve.add(step, rate)
    >>> moved = growth("learning_rate", curve)
    >>> moved.since, moved.peak, moved.peak_step, round(moved.now / moved.peak, 1)
    (96, 0.002, 0, 6.6)
    """
    points = [*curve.blocks, *zip(curve.steps[-1:], curve.values[-1:], strict=True)]
    before = _before_growth(points)
    if before is None:
        return None
    peak_step, peak = max(points[: before + 1], key=lambda point: point[1])
    high = [point for point in points[before + 1 :] if point[1] > GROWN * peak]
    return Moved(
        setting=setting,
        since=points[before + 1][0],
        until=high[-1][0],
        now=max(value for _, value in high),
        peak=peak,
        peak_step=peak_step,
    )


def _before_growth(points: Sequence[Point]) -> int | None:
    """Return the place of the last point before a growth that a warm-up cannot be."""
    began, peak, highest = -1, 0.0, 0.0
    for place, ((_, before), (_, now)) in enumerate(pairwise(points)):
        highest = max(highest, before)
        if now <= before * (1 + 1e-6):
            began, peak = place + 1, highest
        elif place > 2 and now > LEAP * before > 0:
            began, peak = place, highest
        if began >= 0 and now > GROWN * peak > 0:
            return began
    return None


def change(name: str, history: History) -> Moved | None:
    """Return the change of a setting that is recorded as it moves.

    Movement from the first steps on is a schedule.
    """
    first, curve = history.track(name).first, history.curve(name)
    if len(first) < 2 or first[1].step - first[0].step < STOOD:
        return None
    stood, now = first[0].values[0][0], curve.values[-1]
    if not _is_changed(name, stood, now):
        return None
    # Of the loop's settings only what follows at once is their doing.
    return Moved(
        setting=name.partition(".")[2],
        since=first[1].step,
        until=curve.steps[-1] if name in LOOP else history.step,
        now=now,
        peak=stood,
        peak_step=first[0].step,
    )


def _is_changed(name: str, stood: float, now: float) -> bool:
    if name in AMOUNTS:
        return now > GROWN * stood
    if name in LOOP:
        fell = stood > OTHER * now
        # A scaler looks for its scale by doubling; only a fall says something.
        return fell if name == LOOP[2] else fell or now > OTHER * stood
    lengths = max(1 - stood, 1e-12), max(1 - now, 1e-12)
    return max(lengths) >= CHANGED * min(lengths)


def moved_before(history: History, step: int) -> Moved | None:
    """Return the setting that moved before a step, the earliest first.

    A symptom that begins long after a setting is back has another cause.
    """
    found = [growth(RATE, history.curve(RATE))]
    found += [change(name, history) for name in (*AMOUNTS, *AVERAGES, *LOOP)]
    before = [m for m in found if m and m.since <= step <= m.until + AFTER]
    return min(before, key=lambda one: one.since, default=None)
