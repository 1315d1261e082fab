"""Score a forecaster on the benchmark's recorded runs, offline and never ahead.

A forecaster is made anew for every run and is called once per step, in order, with what
was read in that step and nothing else; it answers whether to raise the alarm:

    def forecaster():
        def alarm(step, readings):
            return readings["loss"][0] > 5
        return alarm

``readings`` are quantity → values over sites and heads; ``readings.records`` are the
same with their sites, and ``readings.details`` what the run knows of its model. Run
files name neither family nor severity. A maker that takes one argument gets the
labelled runs it may be tuned on: those of other seeds, or of other families.
"""

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from equipoise.errors import InputError
from equipoise.records import Reading
from equipoise.store import open_run
from equipoise_lab.storms.labels import Label
from equipoise_lab.storms.plan import EXOGENOUS

Values = NDArray[np.float64]
Readings = Mapping[str, Values]
Alarm = Callable[[int, Any], object]
"""The step and its ``StepReadings`` → whether to raise the alarm."""
Maker = Callable[..., Alarm]
Statistic = Callable[[int, Any], float]
"""The step and its ``StepReadings`` → the number that a threshold is laid on."""
Course = Sequence[tuple[int, float]]

WINDOW = 200
"""An alarm this many steps before onset, or fewer, is a hit."""
EPISODE = 100
"""Alarms of one run within so many steps count once."""
PER = 10_000
"""Steps that a rate of false alarms is given for."""


class StepReadings(dict[str, Values]):
    """What was read in one step."""

    def __init__(self, records: Sequence[Reading], details: Mapping[str, Any]) -> None:
        super().__init__(
            (one.quantity, np.concatenate([np.array(v, float) for v in one.values]))
            for one in records
        )
        self.records, self.details = records, details


def steps_of(
    path: Path, only: Collection[str] | None = None
) -> Iterator[tuple[int, StepReadings]]:
    """Yield a run file step by step: what was read in each, or ``only`` part of it."""
    run = open_run(path)
    by_step: dict[int, dict[str, dict[str, tuple[float, ...]]]] = {}
    for quantity in run.quantities:
        if only is not None and quantity not in only:
            continue
        for site, (steps, values) in run.series(quantity).items():
            rows = values.reshape(len(steps), -1).tolist()
            for step, row in zip(steps.tolist(), rows, strict=True):
                here = by_step.setdefault(step, {}).setdefault(quantity, {})
                here[site] = tuple(row)
    for step in sorted(by_step):
        yield step, StepReadings(_records(step, by_step[step]), run.info.details)


def _records(
    step: int, given: Mapping[str, Mapping[str, tuple[float, ...]]]
) -> list[Reading]:
    return [
        Reading(
            step=step,
            quantity=quantity,
            sites=tuple(sites),
            values=tuple(sites.values()),
        )
        for quantity, sites in given.items()
    ]


@dataclass(frozen=True, kw_only=True)
class ScoredTrial:
    """One run under one forecaster."""

    label: Label
    alarms: tuple[int, ...]
    """The first step of each episode."""

    @property
    def hit(self) -> int | None:
        """The first alarm that foresees the failure, or None."""
        if not self.label.is_forecastable or self.label.onset is None:
            return None
        first = max(self.label.injected, self.label.onset - WINDOW)
        timely = (a for a in self.alarms if first <= a < self.label.onset)
        return next(timely, None)

    @property
    def lead(self) -> int:
        """Steps between the alarm and the onset; 0 for a miss."""
        return 0 if self.hit is None else (self.label.onset or 0) - self.hit

    @property
    def false_alarms(self) -> int:
        """Alarms in a stable run, or before anything was wrong."""
        if self.label.is_stable:
            return len(self.alarms)
        if not self.label.is_forecastable or self.label.onset is None:
            return 0
        first = max(self.label.injected, self.label.onset - WINDOW)
        return sum(alarm < first for alarm in self.alarms)

    @property
    def stable_steps(self) -> int:
        return self.label.steps if self.label.is_stable else 0


@dataclass(frozen=True, kw_only=True)
class Score:
    """A forecaster over a set of runs."""

    trials: tuple[ScoredTrial, ...]

    @property
    def forecastable(self) -> list[ScoredTrial]:
        return [
            t
            for t in self.trials
            if t.label.is_forecastable and t.label.storm.family not in EXOGENOUS
        ]

    @property
    def recall(self) -> float:
        """Share of foreseeable failures with a timely alarm; NaN without any."""
        runs = self.forecastable
        return sum(t.hit is not None for t in runs) / len(runs) if runs else math.nan

    @property
    def false_alarms(self) -> int:
        return sum(t.false_alarms for t in self.trials)

    @property
    def stable_steps(self) -> int:
        return sum(t.stable_steps for t in self.trials)

    @property
    def rate(self) -> float:
        """False alarms per 10,000 stable steps."""
        steps = self.stable_steps
        return PER * self.false_alarms / steps if steps else math.nan

    @property
    def rate_bound(self) -> float:
        """Its exact Poisson 95 % upper bound."""
        return PER * poisson_bound(self.false_alarms) / max(1, self.stable_steps)

    @property
    def median_lead(self) -> float:
        leads = [t.lead for t in self.forecastable]
        return float(np.median(leads)) if leads else math.nan

    def recall_interval(self) -> tuple[float, float]:
        """Return the exact (Clopper–Pearson) 95 % interval of recall."""
        runs = self.forecastable
        if not runs:
            return math.nan, math.nan
        hits = sum(t.hit is not None for t in runs)
        found = stats.binomtest(hits, len(runs)).proportion_ci(0.95, "exact")
        return float(found.low), float(found.high)


def poisson_bound(count: int) -> float:
    """Return the largest mean under which so few events are not rarer than 5 %.

    >>> round(poisson_bound(0), 3), round(poisson_bound(2), 3)
    (2.996, 6.296)
    """
    low, high = float(count), count + 20 * math.sqrt(count + 1) + 20
    for _ in range(200):
        middle = (low + high) / 2
        if _at_most(count, middle) > 0.05:
            low = middle
        else:
            high = middle
    return high


def _at_most(count: int, mean: float) -> float:
    """Return the probability of so few events."""
    logs = [
        k * math.log(mean) - mean - math.lgamma(k + 1) if mean else -math.inf * bool(k)
        for k in range(count + 1)
    ]
    return math.fsum(math.exp(value) for value in logs)


def episodes(alarm: Alarm, steps: Iterable[tuple[int, Readings]]) -> tuple[int, ...]:
    """Return when a forecaster raises the alarm; one lasts a hundred steps."""
    found: list[int] = []
    for step, readings in steps:
        if alarm(step, readings) and (not found or step - found[-1] >= EPISODE):
            found.append(step)
    return tuple(found)


def crossings(course: Course, threshold: float) -> tuple[int, ...]:
    """Return the episodes in which a statistic is at or above a threshold."""
    found: list[int] = []
    for step, value in course:
        if value >= threshold and (not found or step - found[-1] >= EPISODE):
            found.append(step)
    return tuple(found)


def at_level(courses: Sequence[tuple[Label, Course]], threshold: float) -> Score:
    """Score a statistic at a threshold."""
    return Score(
        trials=tuple(
            ScoredTrial(label=label, alarms=crossings(course, threshold))
            for label, course in courses
        )
    )


def matched(courses: Sequence[tuple[Label, Course]], allowed: int) -> float:
    """Return the lowest threshold with at most so many false alarms.

    It is chosen on the very runs it is scored on, which favours a baseline.
    """
    values = {v for _, course in courses for _, v in course if math.isfinite(v)}
    levels = [*sorted(values), math.inf]
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if at_level(courses, levels[middle]).false_alarms <= allowed:
            high = middle
        else:
            low = middle + 1
    return levels[low]


Split = Literal["seed", "family"]


def score(maker: Maker, found: Sequence[Label], *, split: Split = "seed") -> Score:
    """Score a forecaster; if it is tuned, then without the run's seed (or family)."""
    return score_all({"": maker}, found, split=split)[""]


def score_all(
    makers: Mapping[str, Maker], found: Sequence[Label], *, split: Split = "seed"
) -> dict[str, Score]:
    """Score several forecasters; every run file is read once."""
    runs = [label for label in found if label.outcome != "between"]
    trials: dict[str, list[ScoredTrial]] = {name: [] for name in makers}
    for label in runs:
        mine = getattr(label.storm, split)
        others = [one for one in runs if getattr(one.storm, split) != mine]
        steps = list(steps_of(label.folder / "run.eqp"))
        for name, maker in makers.items():
            tuned = bool(inspect.signature(maker).parameters)
            alarm = maker(others) if tuned else maker()
            trials[name].append(ScoredTrial(label=label, alarms=episodes(alarm, steps)))
    return {name: Score(trials=tuple(some)) for name, some in trials.items()}


def loaded(spec: str) -> Maker:
    """Return the forecaster that ``module:name`` names; the working folder counts."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise InputError(f"{spec!r} names no forecaster: write module:function")
    sys.path.insert(0, "")
    try:
        made: Any = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise InputError(f"no module {module!r}: {error}") from error
    except AttributeError as error:
        raise InputError(f"{module} has no {name!r}") from error
    finally:
        sys.path.remove("")
    if not callable(made):
        raise InputError(f"{spec} is no function that makes a forecaster")
    return made  # type: ignore[no-any-return]
