"""Which family of trouble it looks like, in words, in which block, what helps."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

import numpy as np

from equipoise.judging.features import ALARMING, FIRST, NAMES, Sample, Vector
from equipoise.judging.history import Curve, History

REMEDIES: dict[str, tuple[str, ...]] = {
    "learning rate": ("learning_rate", "update_clip", "qk_norm"),
    "ramp": ("learning_rate", "update_clip", "roll_back"),
    "no warm-up": ("learning_rate", "optimizer_reset", "update_clip"),
    "post-LN": ("learning_rate", "deepnorm_init"),
    "logit growth": ("weight_cap", "qk_clip", "temperature", "qk_norm"),
    "precision": ("master_weights", "keep_fp32"),
    "corrupted data": ("skip_step", "roll_back", "gradient_clip"),
    "adam": ("beta2", "optimizer_reset", "learning_rate"),
    "router": ("router_balance", "learning_rate"),
    "residual": ("weight_cap", "residual_scale", "roll_back"),
    "init": ("weight_cap", "residual_scale", "learning_rate"),
}
"""Family of trouble → remedies that fit it; ``offered`` orders them by what they
rescued."""
WORDS: dict[str, str] = {
    "learning rate": "the learning rate looks too high",
    "ramp": "the learning rate looks too high by now",
    "no warm-up": "the learning rate looks too high for the first steps",
    "post-LN": "this looks like a deep post-LN model that needs a lower rate",
    "logit growth": "attention logits look too large",
    "precision": "the format of the weights looks too coarse",
    "corrupted data": "the data look wrong",
    "adam": "Adam's settings look wrong (β₂ or ε)",
    "router": "the router looks unbalanced",
    "residual": "one block looks to run away",
    "init": "the first weights look too large",
}
"""Family of trouble → what it is, for a reader who has never seen our storms."""
OF_THE_RATE = ("learning rate", "ramp", "no warm-up")


def in_words(cause: str, history: History) -> str:
    """Return a cause in words; of a learning rate, with what its own course shows."""
    plain = WORDS.get(cause, f"it looks like {cause}")
    curve = history.curve("learning_rate")
    first = history.track("learning_rate").first
    if cause not in OF_THE_RATE or not curve.count or not first:
        return plain
    grown = growth(curve)
    if grown is not None:
        step, before, now = grown
        return (
            f"the learning rate has grown from {before:.3g} at step {step} to {now:.3g}"
        )
    began = first[0].values[0][0]
    if began >= 0.5 * curve.largest:
        return f"the learning rate looks too high ({began:.3g} at once, no warm-up)"
    at = f"peak {curve.largest:.3g} at step {curve.largest_step}"
    return f"the learning rate looks too high ({at})"


GROWN = 1.5
"""Growth of the rate, beyond all that was before, that is no warm-up any more."""


def growth(curve: Curve) -> tuple[int, float, float] | None:
    """Return since when a rate grows after it had stood or fallen, from what, to what.

    A warm-up has nothing before it; a restart comes back to a rate that was there.

    >>> curve = Curve()
    >>> rates = [0.002] * 96 + [0.002 * 1.02**i for i in range(96)]
    >>> for step, rate in enumerate(rates): curve.add(step, rate)
    >>> growth(curve)[:2]
    (96, 0.002)
    """
    means = curve.blocks
    i = len(means) - 1
    while i > 0 and means[i][1] > means[i - 1][1] * (1 + 1e-6):
        i -= 1
    if i < 2 or i == len(means) - 1:
        return None  # it grew from the start, or does not grow
    start = means[i][1]
    stood = means[i - 1][1] >= start * (1 - 1e-6)
    most = max(mean for _, mean in means[: i + 1])
    if not stood or curve.values[-1] < GROWN * most:
        return None
    return means[i + 1][0], start, curve.values[-1]


CUT = 4.0
"""Features count up to this many standard deviations of stable runs."""


@dataclass(frozen=True, kw_only=True)
class StableCourse:
    """How stable runs go: centre and spread of each feature, by a run's age.

    Healthy readings change most at the start, so a reading is compared with readings
    of the same age in steps.
    """

    ages: Sequence[int]
    """Steps since the start at which the next row begins."""
    centre: Sequence[Sequence[float]]
    scale: Sequence[Sequence[float]]

    def standardised(self, x: Vector, age: int) -> Vector:
        """Return features in standard deviations, cut off; 0 where not read."""
        row, (centre, scale) = bisect_right(self.ages, age), self._arrays
        cut: Vector = np.clip((x - centre[row]) / scale[row], -CUT, CUT)
        cut[np.isnan(cut)] = 0.0
        return cut

    @cached_property
    def _arrays(self) -> tuple[Vector, Vector]:
        return np.asarray(self.centre), np.asarray(self.scale)


SIGNS = np.array(list(ALARMING.values()), float)
PLACES = np.array([NAMES.index(name) for name in ALARMING])


@dataclass(frozen=True, kw_only=True)
class Band:
    """How far the alarm's readings go in stable runs, by a run's age in steps."""

    ages: Sequence[int]
    centre: Sequence[Sequence[float]]
    reach: Sequence[Sequence[float]]
    """From the centre to the farthest that a stable run of another seed went."""

    def outside(self, x: Vector, age: int) -> Vector:
        """Return how far each reading is out: 1 at the edge, 0 where not read."""
        row, (centre, reach) = bisect_right(self.ages, age), self._arrays
        out: Vector = (SIGNS * x[PLACES] - centre[row]) / reach[row]
        out[np.isnan(out)] = 0.0
        return out

    @cached_property
    def _arrays(self) -> tuple[Vector, Vector]:
        return np.asarray(self.centre), np.asarray(self.reach)


@dataclass(frozen=True, kw_only=True)
class Causes:
    """Families of trouble as linear discriminants of standardised features.

    A family's number is the logarithm of its likelihood, up to one that all share, for
    normal features with the covariance inside families (Fisher's discriminant).
    """

    families: Sequence[str]
    weights: Sequence[Sequence[float]]
    """One row per family, one number per feature."""
    offsets: Sequence[float]

    def ratios(self, s: Vector) -> Vector:
        """Return the logarithm of each family's likelihood, up to a shared number."""
        found: Vector = np.asarray(self.weights) @ s + np.asarray(self.offsets)
        return found

    def ranked(self, s: Vector) -> list[tuple[str, float]]:
        """Return the families with their shares, the likeliest first."""
        ratios = self.ratios(s)
        shares = np.exp(ratios - ratios.max())
        shares /= shares.sum()
        order = np.argsort(-shares, kind="stable")
        return [(self.families[i], round(float(shares[i]), 4)) for i in order]


BY_BLOCK = ("weight.norm", "gradient.norm", "residual.B", "update.norm")
WEIGHTS = BY_BLOCK[0]
BEGAN_APART = math.log(1.25)
"""Least distance of a block's first weights from the median block's, to name it."""


@dataclass(slots=True)
class Layers:
    """Which block has moved away from the others since the first readings."""

    _first: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    _latest: Sample | None = None

    def add(self, sample: Sample) -> None:
        self._latest = sample
        for quantity in BY_BLOCK:
            first = self._first.setdefault(quantity, {})
            rows = sample.table.get(quantity, {})
            for block in sample.blocks:
                start = first.setdefault(block, [])
                if len(start) < FIRST and block in rows:
                    start += _positive_ln(rows[block][0])

    @property
    def distances(self) -> dict[str, float]:
        """How far each block is, in ln: weights, gradient, stream, update together."""
        sample = self._latest
        found = dict.fromkeys(sample.blocks, 0.0) if sample else {}
        for quantity in BY_BLOCK if sample else ():
            for block, distance in self._apart(quantity).items():
                found[block] += distance
        return found

    @property
    def site(self) -> str:
        """The block that has moved away most; nothing where none has."""
        distances = self.distances
        if not any(distances.values()):
            return ""
        return max(distances, key=lambda block: distances[block])

    @property
    def began_apart(self) -> str:
        """The block whose weights began farthest from the others; nothing if near."""
        first = self._first.get(WEIGHTS, {})
        sizes = {block: median(start) for block, start in first.items() if start}
        usual = median(sizes.values()) if sizes else 0.0
        far = {block: abs(size - usual) for block, size in sizes.items()}
        site = max(far, key=lambda block: far[block], default="")
        return site if site and far[site] > BEGAN_APART else ""

    def _apart(self, quantity: str) -> dict[str, float]:
        """Return how far each block's growth is from the median block's."""
        assert self._latest is not None
        rows, first = self._latest.table.get(quantity, {}), self._first[quantity]
        growth: dict[str, float] = {}
        for block in self._latest.blocks:
            for now in _positive_ln(rows[block][0]) if block in rows else ():
                growth[block] = now - median(first[block])
        if quantity == "residual.B":  # what a block adds: the stream carries it on
            growth = _increments(growth)
        usual = median(growth.values()) if growth else 0.0
        return {block: abs(value - usual) for block, value in growth.items()}


def _positive_ln(value: float) -> list[float]:
    """Return ln of a finite positive value; nothing of another."""
    return [math.log(value)] if math.isfinite(value) and value > 0 else []


def _increments(growth: Mapping[str, float]) -> dict[str, float]:
    names = list(growth)
    before = [0.0, *growth.values()]
    return {name: growth[name] - before[i] for i, name in enumerate(names)}
