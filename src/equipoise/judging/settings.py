"""Settings of the training that were seen to move: what was read, never a guess.

Only a setting that is recorded as a reading can be seen; today that is the learning
rate. A setting that moved comes before the symptoms that followed it.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from equipoise.judging.history import Curve, History
from equipoise.records import Finding

SETTINGS = ("learning_rate",)
"""Quantities that the training script chooses and a run records."""
GREW = "setting.grew"
GROWN = 1.5
"""Growth of a setting, beyond all that was before, that is no warm-up any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A setting that grew past everything it had been before."""

    setting: str
    since: int
    """The step from which on it grew."""
    now: float
    peak: float
    """The largest value before it grew, and its step."""
    peak_step: int

    @property
    def times(self) -> float:
        return self.now / self.peak

    def finding(self, step: int) -> Finding:
        """Return it as a finding, as it stands at a step."""
        return Finding.info(step, GREW, **asdict(self), times=self.times)


def growth(setting: str, curve: Curve) -> Moved | None:
    """Return since when a setting grows after it had stood or fallen.

    A warm-up has nothing before it; a restart comes back to a rate that was there.

    >>> curve = Curve()
    >>> rates = [0.002] * 96 + [0.002 * 1.02**i for i in range(96)]
    >>> for step, rate in enumerate(rates): curve.add(step, rate)
    >>> moved = growth("learning_rate", curve)
    >>> moved.since, moved.peak, moved.peak_step, round(moved.times, 1)
    (96, 0.002, 0, 6.6)
    """
    means = curve.blocks
    i = len(means) - 1
    while i > 0 and means[i][1] > means[i - 1][1] * (1 + 1e-6):
        i -= 1
    if i < 2 or i == len(means) - 1:
        return None  # it grew from the start, or does not grow
    peak_step, peak = max(means[: i + 1], key=lambda block: block[1])
    stood = means[i - 1][1] >= means[i][1] * (1 - 1e-6)
    if not stood or peak <= 0 or curve.values[-1] < GROWN * peak:
        return None
    return Moved(
        setting=setting,
        since=means[i + 1][0],
        now=curve.values[-1],
        peak=peak,
        peak_step=peak_step,
    )


def moved_before(history: History, step: int, among: Iterable[str]) -> Moved | None:
    """Return the setting that moved before a step, the earliest first."""
    found = (growth(name, history.curve(name)) for name in SETTINGS if name in among)
    before = [one for one in found if one is not None and one.since <= step]
    return min(before, key=lambda one: one.since, default=None)
