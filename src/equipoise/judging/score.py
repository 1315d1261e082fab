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
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from equipoise.judging.causes import PLACES, Band, Causes, Layers, StableCourse
from equipoise.judging.features import ALARMING, Course, Sample, Vector
from equipoise.records import Record

FILE = "coefficients.json"
WATCHED = tuple(ALARMING)
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
        return _ln_farthest(self.band.outside(x, age))

    def probability(self, z: float) -> float:
        """Return the probability of failure within the horizon."""
        exponent = min(50.0, max(-50.0, self.slope * z + self.offset))
        return 1 / (1 + math.exp(-exponent))

    def bin_of(self, z: float) -> int:
        return bisect_right(self.edges, z)


def _ln_farthest(out: Vector) -> float:
    return math.log(max(LEAST, float(out.max())))


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
    text = (files("equipoise.judging") / FILE).read_text(encoding="utf-8")
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
    """The likeliest family of trouble; nothing while there is nothing to explain.

    From the alarm on it is judged by the mean of the readings since, for 20 steps.
    """
    causes: tuple[tuple[str, float], ...] = ()
    """All of them with their shares, the likeliest first."""
    site: str = ""
    """The block that differs most from the others, where the cause may lie in one."""
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
TELLING = 20
"""Steps after the alarm whose readings tell the cause."""
LOCAL = ("residual", "router", "init")
"""Causes that may lie in one block; of the others no block is named."""


@dataclass(slots=True)
class Telling:
    """The readings that tell a cause: the latest, or those since the alarm."""

    since: int | None = None
    """The step of the alarm."""
    count: int = 0
    mean: Vector | None = None

    def add(self, step: int, s: Vector, *, alarm: bool) -> None:
        """Take a reading in standard deviations of stable runs."""
        if self.since is not None and step - self.since > TELLING:
            return
        if alarm and self.since is None:
            self.since, self.count = step, 0
        self.count = self.count + 1 if self.since is not None else 1
        before = s if self.mean is None or self.count == 1 else self.mean
        self.mean = before + (s - before) / self.count


@dataclass(slots=True)
class Forecaster:
    """Follows one run, sample by sample; causal, the same live and from a file."""

    model: Model = field(default_factory=shipped)
    course: Course = field(default_factory=Course)
    layers: Layers = field(default_factory=Layers)
    stake: float = 0.0
    """ln M."""
    last: Forecast | None = None
    left: dict[str, int] = field(default_factory=dict)
    """Features that have left the band of stable runs, and the first step outside."""
    _bin: int | None = None
    _count: int = 0
    _first: int | None = None
    _telling: Telling = field(default_factory=Telling)

    def add(self, sample: Sample) -> Forecast:
        """Take a sampled step; return what is expected now."""
        x = self.course.add(sample)
        self.layers.add(sample)
        if self._first is None:
            self._first = sample.step
        age = max(0, sample.step - self._first)
        out = self.model.band.outside(x, age)
        z = _ln_farthest(out)
        self._count += 1
        if self._count > ARMED:
            self._bet(z)
            for place in np.flatnonzero(out > 1) if z > 0 else ():
                self.left.setdefault(WATCHED[place], sample.step)
        plain = self._forecast(sample.step, z)
        self.last = plain if self.stake <= 0 else self._explained(plain, x, age, out)
        return self.last

    def _bet(self, z: float) -> None:
        model, now = self.model, self.model.bin_of(z)
        before = len(model.edges) + 1 if self._bin is None else self._bin
        ceiling = CEILING * math.log(model.run_length)
        self.stake = max(self.stake, 0.0) + model.log_odds[before][now]
        self.stake = min(self.stake, ceiling)
        self._bin = now
        if self.stake <= 0:
            self._telling = Telling()

    def _forecast(self, step: int, z: float) -> Forecast:
        model = self.model
        return Forecast(
            step=step,
            probability=model.probability(z),
            horizon=model.horizon,
            expected=model.steps[model.bin_of(z)] if model.steps else math.nan,
            stake=self.stake / math.log(model.run_length),
        )

    def _explained(self, plain: Forecast, x: Vector, age: int, out: Vector) -> Forecast:
        """Return the forecast with its cause, its block and its reasons."""
        causes: list[tuple[str, float]] = []
        if self.model.causes is not None:
            s = self.model.standardised(x, age)
            self._telling.add(plain.step, s, alarm=plain.alarm)
            assert self._telling.mean is not None
            causes = self.model.causes.ranked(self._telling.mean)
        cause = causes[0][0] if causes else ""
        return replace(
            plain,
            cause=cause,
            causes=tuple(causes),
            site=self._site(cause),
            reasons=_reasons(x, out),
        )

    def _site(self, cause: str) -> str:
        if cause not in LOCAL:
            return ""
        return self.layers.began_apart if cause == "init" else self.layers.site


def _reasons(x: Vector, out: Vector) -> tuple[tuple[str, float, float], ...]:
    """Return the readings that are farthest out: name, value, how far."""
    places = [int(k) for k in np.argsort(-out, kind="stable")[:3] if out[k] > NEAR]
    return tuple((WATCHED[k], float(x[PLACES[k]]), float(out[k])) for k in places)
