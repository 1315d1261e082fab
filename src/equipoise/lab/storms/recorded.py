"""A labelled run as the forecast sees it: one row of features per sampled step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.judging.features import (
    AFTER_UPDATE,
    NAMES,
    QUANTITIES,
    Course,
    Sample,
)
from equipoise.judging.history import is_trained
from equipoise.judging.score import ARMED
from equipoise.lab.storms.labels import Label
from equipoise.lab.storms.plan import EXOGENOUS
from equipoise.lab.storms.scoring import WINDOW, steps_of

Matrix = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A labelled run as features."""

    label: Label
    steps: NDArray[np.int64]
    x: Matrix
    """One row per sampled step."""

    @property
    def age(self) -> NDArray[np.int64]:
        """Steps since the first reading."""
        age: NDArray[np.int64] = self.steps - self.steps[0]
        return age

    @property
    def is_failure(self) -> bool:
        """Whether it is one to learn from."""
        inner = self.label.storm.family not in EXOGENOUS
        return self.label.is_forecastable and inner

    @property
    def ahead(self) -> Flags:
        """The rows from which the failure should be foreseen."""
        if not self.is_failure or self.label.onset is None:
            return np.zeros(len(self.steps), bool)
        first = max(self.label.injected, self.label.onset - WINDOW)
        return (self.steps >= first) & (self.steps < self.label.onset)

    @property
    def rows(self) -> Flags:
        """The rows that teach: those ahead of a failure, all of a stable run."""
        chosen = np.ones(len(self.steps), bool) if self.label.is_stable else self.ahead
        chosen = chosen.copy()
        chosen[:ARMED] = False
        return chosen


def samples_of(label: Label) -> Iterator[Sample]:
    """Yield the sampled steps of a run as the forecast meets them live.

    What is read after the optimiser's step comes with the sample after it.
    """
    before: dict[str, Any] = {}
    fresh = True
    for step, readings in steps_of(label.folder / "run.eqp", (*QUANTITIES, "loss")):
        table = {
            r.quantity: dict(zip(r.sites, r.values, strict=True))
            for r in readings.records
        }
        if step == 0 and "loss" in table:
            fresh = not is_trained(table["loss"][""][0], readings.details)
        if "gradient.norm" not in table:
            continue
        now = {q: rows for q, rows in table.items() if q not in AFTER_UPDATE}
        blocks = readings.details.get("blocks") or ()
        yield Sample(step, {**now, **before}, blocks, fresh=fresh)
        before = {q: table[q] for q in AFTER_UPDATE if q in table}


def recorded(label: Label) -> Recorded:
    """Read a run and return its features."""
    course = Course()
    found = [(sample.step, course.add(sample)) for sample in samples_of(label)]
    steps = np.array([step for step, _ in found], np.int64)
    x = np.array([row for _, row in found]).reshape(len(found), len(NAMES))
    return Recorded(label=label, steps=steps, x=x)
