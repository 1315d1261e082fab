"""Score the forecast itself on the benchmark: detection, baselines, misses.

Every run is scored by a forecast that was fitted without its seed, and without the
families that are held out. Criteria: ``docs/forecast.md``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from equipoise.judging.features import ALARMING
from equipoise.judging.score import ARMED, Model
from equipoise.lab.storms.bands import outside, scores
from equipoise.lab.storms.baselines import READ, RULES
from equipoise.lab.storms.fitting import FitOptions, fit, stakes
from equipoise.lab.storms.labels import Label
from equipoise.lab.storms.plan import EXOGENOUS, HELD_OUT_FAMILIES
from equipoise.lab.storms.recorded import Flags, Recorded, recorded
from equipoise.lab.storms.scoring import (
    Course,
    Score,
    Trial,
    at_level,
    crossings,
    matched,
    steps_of,
)

Followed = tuple[Recorded, Model]
"""A run, and the forecast it is scored by."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The recorded runs, each with the model that was fitted without it."""

    runs: Sequence[Recorded]
    options: FitOptions
    small: Model
    """Fitted on all small runs that may be tuned on: it scores the deep tier."""
    by_seed: Mapping[int, Model]

    @cached_property
    def followed(self) -> list[Followed]:
        """Every small run with its model."""
        small = [run for run in self.runs if run.label.storm.tier == "small"]
        return [(run, self.by_seed[run.label.storm.seed]) for run in small]

    @property
    def deep(self) -> list[Followed]:
        deep = [run for run in self.runs if run.label.storm.tier == "deep"]
        return [(run, self.small) for run in deep]


def tunable(
    runs: Sequence[Recorded], *, without: Callable[[Label], bool]
) -> list[Recorded]:
    """Return what a forecast may be fitted on: small runs, no held-out family."""
    return [
        run
        for run in runs
        if run.label.storm.tier == "small"
        and run.label.storm.family not in HELD_OUT_FAMILIES
        and not without(run.label)
    ]


def gather(found: Sequence[Label], options: FitOptions | None = None) -> Evidence:
    """Read every labelled run once and fit a forecast per seed."""
    options = options or FitOptions()
    runs = [recorded(label) for label in found if label.outcome != "between"]
    seeds = sorted({r.label.storm.seed for r in runs if r.label.storm.tier == "small"})
    return Evidence(
        runs=runs,
        options=options,
        small=fit(tunable(runs, without=lambda label: False), options),
        by_seed={s: fit(tunable(runs, without=_of_seed(s)), options) for s in seeds},
    )


def _of_seed(seed: int) -> Callable[[Label], bool]:
    return lambda label: label.storm.seed == seed


def _of_family(family: str) -> Callable[[Label], bool]:
    return lambda label: label.storm.family == family


def stake_course(run: Recorded, model: Model) -> Course:
    """Return the e-detector's stake after every reading of a run."""
    bets = (np.array(model.edges), np.array(model.log_odds), model.run_length)
    values = stakes(scores(model, run), bets)
    return list(zip(run.steps.tolist(), values.tolist(), strict=True))


def detection(followed: Sequence[Followed]) -> Score:
    """Score the alarm."""
    return at_level([(r.label, stake_course(r, m)) for r, m in followed], 1.0)


def summary(score: Score) -> dict[str, Any]:
    """Return a score as numbers."""
    low, high = score.recall_interval()
    caught = [t.lead for t in score.forecastable if t.hit is not None]
    return {
        "failures": len(score.forecastable),
        "hits": sum(t.hit is not None for t in score.forecastable),
        "recall": score.recall,
        "recall_interval": [low, high],
        "false_alarms": score.false_alarms,
        "stable_steps": score.stable_steps,
        "rate": score.rate,
        "rate_bound": score.rate_bound,
        "rate_interval": list(score.rate_interval()),
        "median_lead": score.median_lead,
        "median_lead_of_hits": float(np.median(caught)) if caught else math.nan,
    }


def by_family(score: Score) -> dict[str, dict[str, Any]]:
    """Return hits and leads family by family, the exogenous ones too."""
    table: dict[str, list[Trial]] = {}
    for trial in score.trials:
        if trial.label.is_forecastable:
            table.setdefault(trial.label.storm.family, []).append(trial)
    return {
        family: {
            "failures": len(trials),
            "hits": sum(t.hit is not None for t in trials),
            "median_lead": float(np.median([t.lead for t in trials])),
            "held_out": family in HELD_OUT_FAMILIES,
            "exogenous": family in EXOGENOUS,
        }
        for family, trials in sorted(table.items())
    }


def leave_one_family_out(evidence: Evidence) -> dict[str, dict[str, Any]]:
    """Return hits on each family by a forecast that never met it, nor the seed's runs.

    To keep the number of fits small, seeds are left out by halves.
    """
    small = [r for r, _ in evidence.followed]
    families = sorted({r.label.storm.family for r in small if r.is_failure})
    found: dict[str, dict[str, Any]] = {}
    for family in families:
        runs = [r for r in small if r.is_failure and r.label.storm.family == family]
        model = fit(
            tunable(evidence.runs, without=_of_family(family)), evidence.options
        )
        found[family] = summary(detection([(r, model) for r in runs]))
    return found


def baselines(evidence: Evidence, allowed: int) -> dict[str, dict[str, Any]]:
    """Return every baseline at its own threshold and at the matched one."""
    found = [(run.label, rule_courses(run.label)) for run, _ in evidence.followed]
    return {
        name: _both(name, [(label, courses[name]) for label, courses in found], allowed)
        for name in RULES
    }


def rule_courses(label: Label) -> dict[str, Course]:
    """Return every baseline's number at every step of a run."""
    statistics = {name: rule.make() for name, rule in RULES.items()}
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in RULES}
    for step, readings in steps_of(label.folder / "run.eqp", READ):
        for name, statistic in statistics.items():
            found[name].append((step, statistic(step, readings)))
    return dict(found)


def _both(
    name: str, courses: Sequence[tuple[Label, Course]], allowed: int
) -> dict[str, Any]:
    rule, limit = RULES[name], matched(courses, allowed)
    return {
        "about": rule.about,
        "source": rule.source,
        "threshold": rule.threshold,
        "published": summary(at_level(courses, rule.threshold)),
        "matched_threshold": limit,
        "matched": summary(at_level(courses, limit)),
    }


def best_single(
    evidence: Evidence, names: Sequence[str], allowed: int
) -> dict[str, Any]:
    """Return the feature that does best alone, upwards or downwards.

    It is chosen on the very runs it is scored on: no forecaster could be better chosen.
    """
    found: list[tuple[tuple[float, float], dict[str, Any]]] = []
    for place, name in enumerate(names):
        for sign in (1.0, -1.0):
            courses = [
                (r.label, _feature(r, place, sign)) for r, _ in evidence.followed
            ]
            limit = matched(courses, allowed)
            score = summary(at_level(courses, limit))
            key = (score["recall"], score["median_lead_of_hits"])
            entry = {"reading": name, "side": "above" if sign > 0 else "below"}
            found.append((key, {**entry, "threshold": sign * limit, **score}))
    return max(found, key=lambda one: one[0])[1]


def _feature(run: Recorded, place: int, sign: float) -> Course:
    values = np.where(np.isfinite(run.x[:, place]), sign * run.x[:, place], -math.inf)
    values[:ARMED] = -math.inf
    return list(zip(run.steps.tolist(), values.tolist(), strict=True))


def run_length(followed: Sequence[Followed]) -> dict[str, Any]:
    """Return the run length that controls show, beside the one that is guaranteed."""
    controls = [(r, m) for r, m in followed if r.label.storm.role == "control"]
    readings = sum(len(r.steps) for r, _ in controls)
    alarms = detection(controls).false_alarms
    return {
        "guaranteed": sorted({m.run_length for _, m in controls}),
        "readings": readings,
        "alarms": alarms,
        "measured": readings / alarms if alarms else None,
    }


def farthest(run: Recorded, model: Model, rows: Flags) -> tuple[str, float]:
    """Return the reading that is farthest outside the band in these rows, and how far.

    The edge of the band is 1.
    """
    rows = rows & (np.arange(len(rows)) >= ARMED)
    out = outside(model, run)[rows]
    if not out.size:
        return "", 0.0
    place = int(out.max(0).argmax())
    return list(ALARMING)[place], float(out[:, place].max())


def ceiling(followed: Sequence[Followed]) -> dict[str, int]:
    """Return how many failures are outside the band at any reading before onset.

    No forecaster of these readings that never warns inside the band can foresee more.
    Stable runs that are outside at any reading are counted beside them.
    """
    ahead = [farthest(r, m, r.ahead)[1] > 1 for r, m in followed if r.is_failure]
    stable = [(r, m) for r, m in followed if r.label.is_stable]
    beyond = [farthest(r, m, np.ones(len(r.steps), bool))[1] > 1 for r, m in stable]
    return {
        "failures": len(ahead),
        "failures_outside": sum(ahead),
        "stable": len(beyond),
        "stable_outside": sum(beyond),
    }


def misses(followed: Sequence[Followed]) -> list[dict[str, Any]]:
    """Return every failure that was not foreseen, and every false alarm."""
    found = []
    for run, model in followed:
        course = stake_course(run, model)
        trial = Trial(label=run.label, alarms=crossings(course, 1.0))
        missed = run.label.is_forecastable and trial.hit is None
        if not missed and not trial.false_alarms:
            continue
        onset = run.label.onset or run.label.steps
        before = [v for step, v in course if step < onset]
        storm = run.label.storm
        found.append(
            {
                "kind": "missed" if missed else "false alarm",
                "role": storm.role,
                "family": storm.family,
                "seed": storm.seed,
                "severity": storm.severity,
                "onset": run.label.onset,
                "injected": run.label.injected,
                "alarms": list(trial.alarms),
                "highest_stake": max(before, default=math.nan),
                "farthest": farthest(run, model, run.steps < onset),
                "excess": run.label.validation / run.label.healthy - 1,
            }
        )
    return found
