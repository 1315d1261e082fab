"""The forecast: one calibrated score of a run, and an alarm with a stated run length.

A few strong readings are compared with the band in which those of stable runs stay at
the same age. The score is how far the one that is farthest out is out: 1 at the edge.
So what raised it can be read off. The alarm does not lay a threshold on it. It bets, at
every reading, on where the score lies given where it was one reading before, at odds
that are fair on stable runs: the stake M = max(M, 1)·e is an e-detector (Shin, Ramdas,
Rinaldo), whose mean run length to M ≥ A is at least A readings where stable runs behave
as those the odds were made on. Coefficients: ``equipoise storms fit``.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from equipoise.forecast.causes import Band, Causes, Layers, StableCourse
from equipoise.forecast.features import ALARMING, NAMES, Course, Sample, Vector
from equipoise.records import Record

FILE = "coefficients.json"
LEAST = 0.05
"""Of the score, so that it has a logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Record):
    """Coefficients of the forecast."""

    course: StableCourse
    band: Band
    edges: Sequence[float]
    """Between the bins of z, the logarithm of the score."""
    log_odds: Sequence[Sequence[float]]
    """ln e for each bin of z a reading before, and each bin now; the last row is for
    the first reading."""
    run_length: float
    """A: readings between false alarms, on average and at least."""
    slope: float = 1.0
    offset: float = 0.0
    """Probability = 1 / (1 + exp(-(slope · z + offset)))."""
    horizon: int = 200
    """Steps within which the failure is expected."""
    steps: Sequence[float] = ()
    """Median steps to onset, by bin of z."""
    causes: Causes | None = None
    """All families, to name the one: what comes after the onset counts too."""
    made_by: Mapping[str, Any] = field(default_factory=dict)
    """On what it was fitted, and with which settings."""

    def standardised(self, x: Vector, age: int) -> Vector:
        """Return features in standard deviations of stable runs of that age."""
        return self.course.standardised(x, age)

    def score(self, x: Vector, age: int) -> float:
        """Return z: ln of how far the reading that is farthest out is out."""
        return math.log(max(LEAST, float(self.band.outside(x, age).max())))

    def probability(self, z: float) -> float:
        """Return the probability of failure within the horizon."""
        exponent = min(50.0, max(-50.0, self.slope * z + self.offset))
        return 1 / (1 + math.exp(-exponent))

    def bin_of(self, z: float) -> int:
        return int(np.searchsorted(self.edges, z, side="right"))


def model_from(given: Mapping[str, Any]) -> Model:
    """Return the model that a JSON object holds."""
    causes = given.get("causes")
    made = {
        **given,
        "course": StableCourse(**given["course"]),
        "band": Band(**given["band"]),
        "causes": Causes(**causes) if causes else None,
    }
    return Model(**made)


@cache
def shipped() -> Model:
    """Return the coefficients that come with the package."""
    text = (files("equipoise.forecast") / FILE).read_text(encoding="utf-8")
    return model_from(json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(Record):
    """What is expected of a run after one sampled step."""

    step: int
    probability: float
    """Of failure within ``horizon`` steps."""
    horizon: int
    expected: float
    """Steps to the failure if there is one: the median of such runs; NaN unknown."""
    stake: float
    """ln M / ln A of the e-detector: the alarm is at 1."""
    cause: str = ""
    """The likeliest family of trouble."""
    causes: tuple[tuple[str, float], ...] = ()
    """All of them with their shares, the likeliest first."""
    site: str = ""
    """The block that differs most from the others, where one does."""
    reasons: tuple[tuple[str, float, float], ...] = ()
    """The readings that are farthest out: name, value, how far (1: at the edge)."""

    @property
    def alarm(self) -> bool:
        return self.stake >= 1.0


CEILING = 1.5
"""The stake grows no further than this, so that it can come down again."""
ARMED = 3
"""Readings before the first bet: until then growth has no start."""
NEAR = 0.5
"""Readings farther out than this are named as reasons."""


@dataclass(slots=True)
class Forecaster:
    """Follows one run, sample by sample; causal, the same live and from a file."""

    model: Model = field(default_factory=shipped)
    course: Course = field(default_factory=Course)
    layers: Layers = field(default_factory=Layers)
    stake: float = 0.0
    """ln M."""
    last: Forecast | None = None
    _bin: int | None = None
    _count: int = 0
    _first: int | None = None

    def add(self, sample: Sample) -> Forecast:
        """Take a sampled step; return what is expected now."""
        x = self.course.add(sample)
        self.layers.add(sample)
        if self._first is None:
            self._first = sample.step
        age = max(0, sample.step - self._first)
        z = self.model.score(x, age)
        self._count += 1
        if self._count > ARMED:
            self._bet(z)
        self.last = self._forecast(sample.step, age, x)
        return self.last

    def _bet(self, z: float) -> None:
        model, now = self.model, self.model.bin_of(z)
        before = len(model.edges) + 1 if self._bin is None else self._bin
        ceiling = CEILING * math.log(model.run_length)
        self.stake = max(self.stake, 0.0) + model.log_odds[before][now]
        self.stake = min(self.stake, ceiling)
        self._bin = now

    def _forecast(self, step: int, age: int, x: Vector) -> Forecast:
        model, z = self.model, self.model.score(x, age)
        out = model.band.outside(x, age)
        parts = dict(zip(ALARMING, out.tolist(), strict=True))
        values = dict(zip(NAMES, x.tolist(), strict=True))
        most = sorted(parts, key=lambda name: -parts[name])[:3]
        ranked = model.causes.ranked(model.standardised(x, age)) if model.causes else []
        return Forecast(
            step=step,
            probability=model.probability(z),
            horizon=model.horizon,
            expected=model.steps[model.bin_of(z)] if model.steps else math.nan,
            stake=self.stake / math.log(model.run_length),
            cause=ranked[0][0] if ranked else "",
            causes=tuple(ranked),
            site=self.layers.site,
            reasons=tuple((n, values[n], parts[n]) for n in most if parts[n] > NEAR),
        )
