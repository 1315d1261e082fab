"""Fit the forecast on labelled runs: the score, and the odds of its bets.

Stable runs make the band; failures, by their readings between injection and onset, and
stable runs make the odds. Every run weighs as much as any other. The odds, the
probability and the run length are made from scores against the band of other seeds.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from equipoise.judging.causes import CUT, StableCourse
from equipoise.judging.features import Vector
from equipoise.judging.score import ARMED, Model
from equipoise.lab.storms.bands import Bands, short
from equipoise.lab.storms.recorded import Matrix, Recorded
from equipoise.lab.storms.scoring import WINDOW

NEWTON_ROUNDS = 30


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Settings of the fit."""

    ages: tuple[int, ...] = (15, 20, 30, 50, 80, 150)
    """Steps at which stable runs are described anew."""
    shrink: float = 1.0
    """Added to the variances of features inside families, where causes are told."""
    narrowest: float = 0.5
    """The least reach of a band, in standard deviations over all stable readings."""
    edges: tuple[float, ...] = (0.0, 0.095, 0.223, 0.405, 0.693, 1.099, 1.792)
    """Between the bins of z that bets are made on: scores of 1, 1.1, … 6."""
    boldest: float = 8.0
    """The largest |ln e| of one bet."""
    run_lengths: tuple[float, ...] = (2e3, 5e3, 2e4, 1e5, 1e6, 1e8, 1e10)
    """Values of A to choose from, by the false alarms in cross-validation."""
    per: float = 30_000.0
    """Stable steps per false alarm that is accepted in cross-validation."""


def fit(runs: Sequence[Recorded], options: FitOptions | None = None) -> Model:
    """Fit everything on these runs but the causes.

    Raises:
        ValueError: If there is no failure, or no stable run, to learn from.
    """
    options = options or FitOptions()
    usable = [run for run in runs if run.rows.any()]
    if len({run.is_failure for run in usable}) < 2:
        raise ValueError("a fit needs failures and stable runs")
    bands = Bands(usable, ages=options.ages, narrowest=options.narrowest)
    model = Model(
        course=stable_course(usable, options),
        band=bands.band(),
        edges=(),
        log_odds=((0.0,), (0.0,)),
        run_length=2000.0,
        horizon=WINDOW,
    )
    unseen = [bands.unseen(run) for run in usable]
    model = _with_odds(model, usable, unseen, options)
    model = _with_probability(model, usable, unseen)
    return replace(model, made_by=_made_by(usable, options))


def _made_by(runs: Sequence[Recorded], options: FitOptions) -> dict[str, Any]:
    return {
        "command": "equipoise storms fit",
        "failures": sum(run.is_failure for run in runs),
        "stable": sum(run.label.is_stable for run in runs),
        "seeds": sorted({run.label.storm.seed for run in runs}),
        "families": sorted({run.label.storm.family for run in runs if run.is_failure}),
        "options": asdict(options),
    }


def stable_course(runs: Sequence[Recorded], options: FitOptions) -> StableCourse:
    """Return centre and spread of every feature in stable runs, by age."""
    stable = [run for run in runs if run.label.is_stable]
    x = np.concatenate([run.x for run in stable])
    age = np.concatenate([run.age for run in stable])
    rows = np.searchsorted(options.ages, age, side="right")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a feature no run has yet
        overall = np.maximum(np.nan_to_num(np.nanstd(x, 0), nan=1.0), 1e-3)
        centre, scale = [], []
        for row in range(len(options.ages) + 1):
            here = x[rows == row] if (rows == row).any() else x
            centre.append(short(np.nan_to_num(np.nanmedian(here, 0))))
            spread = np.nan_to_num(np.nanstd(here, 0))
            scale.append(short(np.maximum(spread, 0.25 * overall)))
    return StableCourse(ages=options.ages, centre=centre, scale=scale)


def standardised(course: StableCourse, run: Recorded) -> Matrix:
    """Return every row of a run in standard deviations of stable runs."""
    row = np.searchsorted(course.ages, run.age, side="right")
    z = (run.x - np.asarray(course.centre)[row]) / np.asarray(course.scale)[row]
    cut: Matrix = np.clip(np.nan_to_num(z, nan=0.0), -CUT, CUT)
    return cut


def logistic(
    design: Matrix, y: Vector, weights: Vector, *, ridge: float
) -> tuple[Vector, float]:
    """Return heights and intercept of a weighted ridge logistic regression (Newton)."""
    full = np.concatenate([design, np.ones((len(design), 1))], 1)
    penalty = np.full(full.shape[1], ridge)
    penalty[-1] = 1e-6
    beta = np.zeros(full.shape[1])
    for _ in range(NEWTON_ROUNDS):
        p = 1 / (1 + np.exp(-np.clip(full @ beta, -30, 30)))
        gradient = full.T @ (weights * (p - y)) + penalty * beta
        curvature = weights * np.maximum(p * (1 - p), 1e-6)
        hessian = (full * curvature[:, None]).T @ full + np.diag(penalty)
        step = np.linalg.solve(hessian, gradient)
        beta = beta - step * min(1.0, 5.0 / max(float(np.abs(step).max()), 1e-12))
        if np.abs(step).max() < 1e-6:
            break
    return beta[:-1], float(beta[-1])


def _with_odds(
    model: Model, runs: Sequence[Recorded], z: Sequence[Vector], options: FitOptions
) -> Model:
    edges = np.array(options.edges)
    odds = _odds(runs, z, edges, options.boldest)
    lengths = options.run_lengths
    chosen = lengths[-1]
    for length in lengths:
        alarms, steps = _false_alarms(runs, z, (edges, odds, length))
        if alarms <= max(1.0, steps / options.per):
            chosen = length
            break
    return replace(
        model,
        edges=short(edges),
        log_odds=[short(r) for r in odds],
        run_length=chosen,
    )


def _odds(
    runs: Sequence[Recorded], z: Sequence[Vector], edges: Vector, boldest: float
) -> Matrix:
    """Return ln e by the bin before (the last row: none) and the bin now.

    e is the ratio of the bins' shares ahead of failures to those in stable runs, every
    run counted alike; so its mean over stable readings is 1 for every bin before.
    """
    bins = len(edges) + 1
    counts = np.full((2, bins + 1, bins), 0.0)
    for run, scored in zip(runs, z, strict=True):
        kind = int(run.is_failure)
        now = np.searchsorted(edges, scored[run.rows], side="right")
        weight = 50 / len(now)
        np.add.at(counts[kind], (now[:-1], now[1:]), weight)
        np.add.at(counts[kind], (np.full(1, bins), now[:1]), 1.0)
    usual = counts.sum(1, keepdims=True) / counts.sum((1, 2), keepdims=True)
    shares = counts + 5 * usual + 1e-3  # few transitions: the bins' shares overall
    shares /= shares.sum(2, keepdims=True)
    ln = np.clip(np.log(shares[1] / shares[0]), -boldest, boldest)
    mean = (shares[0] * np.exp(ln)).sum(1, keepdims=True)
    fair: Matrix = ln - np.log(np.maximum(mean, 1.0))  # the cut must not favour us
    return fair


Bets = tuple[Vector, Matrix, float]


def stakes(z: Vector, bets: Bets) -> Vector:
    """Return ln M / ln A after each reading of one run."""
    edges, odds, length = bets
    now = np.searchsorted(edges, z, side="right")
    stake, before, found = 0.0, len(edges) + 1, np.zeros(len(z))
    for place in range(ARMED, len(z)):
        stake = min(max(stake, 0.0) + odds[before, now[place]], 1.5 * math.log(length))
        before, found[place] = now[place], stake / math.log(length)
    return found


def _false_alarms(
    runs: Sequence[Recorded], z: Sequence[Vector], bets: Bets
) -> tuple[int, int]:
    alarms = steps = 0
    for run, scored in zip(runs, z, strict=True):
        if run.label.is_stable:
            over = run.steps[stakes(scored, bets) >= 1]
            steps += run.label.steps
            last = -math.inf
            for step in over.tolist():
                if step - last >= 100:
                    alarms, last = alarms + 1, step
    return alarms, steps


def _with_probability(
    model: Model, runs: Sequence[Recorded], z: Sequence[Vector]
) -> Model:
    pairs = [
        (s[r.rows], np.full(int(r.rows.sum()), float(r.is_failure)), r)
        for r, s in zip(runs, z, strict=True)
    ]
    all_z, y = (np.concatenate([p[i] for p in pairs]) for i in (0, 1))
    slope, offset = logistic(all_z[:, None], y, np.full(len(y), 1.0), ridge=1e-3)
    left = np.concatenate(
        [(r.label.onset or 0) - r.steps[r.rows] for _, _, r in pairs if r.is_failure]
    )
    scored = np.concatenate([p[0] for p in pairs if p[2].is_failure])
    bins = np.searchsorted(model.edges, scored, side="right")
    steps = [
        float(np.median(left[bins == b]))
        if (bins == b).any()
        else float(np.median(left))
        for b in range(len(model.edges) + 1)
    ]
    return replace(model, slope=float(slope[0]), offset=offset, steps=steps)
