"""Which family of trouble it looks like, in which block, and what helps against it."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from equipoise.forecast.features import ALARMING, FIRST, NAMES, Sample, Vector

REMEDIES: dict[str, tuple[str, ...]] = {
    "learning rate": ("learning_rate", "update_clip", "qk_norm"),
    "ramp": ("learning_rate", "roll_back", "update_clip"),
    "no warm-up": ("learning_rate", "update_clip"),
    "post-LN": ("deepnorm_init", "learning_rate"),
    "logit growth": ("qk_norm", "qk_clip", "temperature"),
    "precision": ("keep_fp32",),
    "corrupted data": ("skip_step", "roll_back", "gradient_clip"),
    "adam": ("beta2", "learning_rate", "optimizer_reset"),
    "router": ("router_balance", "learning_rate"),
    "residual": ("residual_scale", "roll_back"),
    "init": ("residual_scale", "learning_rate"),
}
"""Family of trouble → remedies in the order to try them."""
CUT = 4.0
"""Features count up to this many standard deviations of stable runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
        row = bisect_right(self.ages, age)
        z = (x - np.asarray(self.centre[row])) / np.asarray(self.scale[row])
        cut: Vector = np.clip(np.nan_to_num(z, nan=0.0), -CUT, CUT)
        return cut


SIGNS = np.array(list(ALARMING.values()), float)
PLACES = np.array([NAMES.index(name) for name in ALARMING])


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """How far the alarm's readings go in stable runs, by a run's age in steps."""

    ages: Sequence[int]
    centre: Sequence[Sequence[float]]
    reach: Sequence[Sequence[float]]
    """From the centre to the farthest that a stable run of another seed went."""

    def outside(self, x: Vector, age: int) -> Vector:
        """Return how far each reading is out: 1 at the edge, 0 where not read."""
        row = bisect_right(self.ages, age)
        far = SIGNS * x[PLACES] - np.asarray(self.centre[row])
        out: Vector = np.nan_to_num(far / np.asarray(self.reach[row]), nan=0.0)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """Families of trouble as linear discriminants of standardised features.

    A family's number is the logarithm of a likelihood ratio, of the family to stable
    runs, for normal features with the stable runs' covariance (Fisher's discriminant).
    """

    families: Sequence[str]
    weights: Sequence[Sequence[float]]
    """One row per family, one number per feature."""
    offsets: Sequence[float]

    def ratios(self, s: Vector) -> Vector:
        """Return the logarithm of each family's likelihood ratio."""
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


@dataclass(slots=True)
class Layers:
    """Which block has moved away from the others since the first readings."""

    site: str = ""
    distance: float = 0.0
    """How far, in ln: of weights, gradient, stream and update together."""
    _first: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        distances = dict.fromkeys(sample.blocks, 0.0)
        for quantity in BY_BLOCK:
            rows = sample.table.get(quantity, {})
            for block, distance in self._apart(quantity, rows, sample.blocks).items():
                distances[block] += distance
        if any(distances.values()):
            self.site = max(distances, key=lambda block: distances[block])
            self.distance = distances[self.site]

    def _apart(
        self,
        quantity: str,
        rows: Mapping[str, Sequence[float]],
        blocks: Sequence[str],
    ) -> dict[str, float]:
        """Return how far each block's growth is from the median block's."""
        first = self._first.setdefault(quantity, {})
        growth: dict[str, float] = {}
        for block in blocks:
            value = rows[block][0] if block in rows else math.nan
            if not (math.isfinite(value) and value > 0):
                continue
            start = first.setdefault(block, [])
            if len(start) < FIRST:
                start.append(math.log(value))
            growth[block] = math.log(value) - median(start)
        if quantity == "residual.B":  # what a block adds: the stream carries it on
            growth = _increments(growth)
        usual = median(growth.values()) if growth else 0.0
        return {block: abs(value - usual) for block, value in growth.items()}


def _increments(growth: Mapping[str, float]) -> dict[str, float]:
    names = list(growth)
    before = [0.0, *growth.values()]
    return {name: growth[name] - before[i] for i, name in enumerate(names)}
