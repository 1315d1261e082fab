"""The band in which stable runs stay, and how far out a run is."""

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from equipoise.judging.causes import PLACES, SIGNS, Band
from equipoise.judging.features import (
    ALARMING,
    GROWTH,
    LEVEL,
    SPEED,
    STEADY,
    TREND,
    Vector,
)
from equipoise.judging.score import ARMED, LEAST, Model
from equipoise.lab.storms.recorded import Matrix, Recorded

PARTS = 5
"""Into which runs of a single seed are split."""
SMALLEST = {LEVEL: 0.1, GROWTH: 0.1, SPEED: 0.1, TREND: 0.3, STEADY: 0.15}
"""The least reach of a band by the way of reading: 10 % in ten steps is no trouble."""
NAMED = {
    "unchanged, speed": 0.3,
    "theta, level": 2.3,
    "theta, growth": 2.3,
    "first to last, growth": 1.6,
    "queries and keys, growth": 1.6,
    "projections, speed": 0.6,
    "stream step, growth": 0.5,
    "router load, growth": 1.0,
}
"""The least reach where a rule has a threshold, ``update.lost`` at 0.3 of the weights
and ``attention.saturated`` at θ = 0.1, whose ln is -2.3; and where models differ:
gradients over depth shift fivefold when a trained model is tuned, and projections that
begin at 0.02 grow by 1.6 in ten healthy steps. The busiest expert of a healthy router
may take a third of an even share more, so a whole one is the least that counts."""
LEAST_REACH = np.array(
    [NAMED.get(name, SMALLEST[name.rpartition(", ")[2]]) for name in ALARMING]
)

IS_CHANGE = np.array([not name.endswith(LEVEL) for name in ALARMING])


def short(values: Vector) -> list[float]:
    """Return numbers with five digits, as they are kept."""
    return [float(f"{v:.5g}") for v in values]


def scores(model: Model, run: Recorded) -> Vector:
    """Return z of every row of a run, as ``Model.score`` does one by one."""
    return _ln_farthest(outside(model, run))


def outside(model: Model, run: Recorded) -> Matrix:
    """Return how far each reading of the alarm is out, row by row; 0 where not read."""
    band = model.band
    row = np.searchsorted(band.ages, run.age, side="right")
    far = SIGNS * run.x[:, PLACES] - np.asarray(band.centre)[row]
    out: Matrix = np.nan_to_num(far / np.asarray(band.reach)[row], nan=0.0)
    return out


def _ln_farthest(out: Matrix) -> Vector:
    z: Vector = np.log(np.maximum(LEAST, np.nan_to_num(out, nan=0.0).max(1)))
    return z


class Bands:
    """Bands of stable runs, of all seeds and without some.

    The reach of a reading is the farthest that a stable run went, times how far runs of
    one seed went beyond the runs of all others: what a new seed may do.
    """

    def __init__(
        self, runs: Sequence[Recorded], *, ages: Sequence[int], narrowest: float
    ) -> None:
        self.ages = ages
        self.stable = [run for run in runs if run.label.is_stable]
        self.groups = {id(run): run.label.storm.seed for run in runs}
        if len(set(self.groups.values())) == 1:  # a small set: parts of it, in turn
            self.groups = {id(run): place % PARTS for place, run in enumerate(runs)}
        x = np.concatenate([SIGNS * run.x[:, PLACES] for run in self.stable])
        rows = np.concatenate([self._rows(run) for run in self.stable])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what no run has read
            overall = np.nan_to_num(np.nanmedian(x, 0))
            spread = np.nan_to_num(np.nanstd(x, 0), nan=1.0)
            centre = [np.nanmedian(x[rows == r], 0) for r in range(len(self.ages) + 1)]
        self.centre = np.where(np.isfinite(centre), centre, overall)
        self.least = np.maximum(narrowest * spread, LEAST_REACH)
        # A change that is no trouble counts from no change, also where stable runs of
        # that age go the other way: a model that is tuned goes nowhere yet.
        from_none = np.where(IS_CHANGE, LEAST_REACH - self.centre, 0.0)
        self.least = np.maximum(self.least, from_none)
        self.farthest = self._farthest()

    def _rows(self, run: Recorded) -> NDArray[np.int64]:
        return np.searchsorted(self.ages, run.age, side="right")

    def far(self, run: Recorded) -> Matrix:
        """Return how far readings are from the centre; −∞ where not read, or early."""
        found: Matrix = SIGNS * run.x[:, PLACES] - self.centre[self._rows(run)]
        found = np.nan_to_num(found, nan=-np.inf)
        found[:ARMED] = -np.inf
        return found

    def _farthest(self) -> dict[int, Matrix]:
        """Return the farthest of each seed's stable runs, by age and reading."""
        found: dict[int, Matrix] = {}
        for run in self.stable:
            most = found.setdefault(
                self.groups[id(run)], np.full(self.centre.shape, -np.inf)
            )
            np.maximum.at(most, self._rows(run), self.far(run))
        return found

    def reach(self, without: frozenset[int]) -> Matrix:
        """Return the farthest of all seeds but these, and no less than the least."""
        kept = [most for seed, most in self.farthest.items() if seed not in without]
        most: Matrix = np.max([*kept, np.zeros_like(self.centre)], 0)
        return np.maximum(most, self.least)  # type: ignore[no-any-return]

    def beyond(self, without: frozenset[int]) -> Vector:
        """Return how far a seed's runs went beyond those of all other seeds."""
        most = np.ones(self.centre.shape[1])
        for seed, farthest in self.farthest.items():
            if seed not in without:
                others = self.reach(without | {seed})
                most = np.maximum(most, (farthest / others).max(0))
        return most

    def band(self) -> Band:
        """Return the band of all runs."""
        reach = self.reach(frozenset()) * self.beyond(frozenset())
        return Band(
            ages=self.ages,
            centre=[short(row) for row in self.centre],
            reach=[short(row) for row in reach],
        )

    def unseen(self, run: Recorded) -> Vector:
        """Return a run's scores against the band of all other seeds."""
        out = frozenset([self.groups[id(run)]])
        reach = self.reach(out) * self.beyond(out)
        return _ln_farthest(self.far(run) / reach[self._rows(run)])
