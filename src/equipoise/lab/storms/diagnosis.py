"""What a cause looks like, and how often it and the block at fault are named.

A cause is told at the alarm and for 20 steps after it, by the mean of the readings
since, so that is what families are learnt from: in a run without an alarm, the readings
from its onset on. Causes are learnt from all families, but never from the run's seed.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from equipoise.judging.causes import Causes
from equipoise.judging.features import NAMES, Vector
from equipoise.judging.score import ARMED, TELLING, Forecaster, Model
from equipoise.lab.storms.bands import short
from equipoise.lab.storms.evaluation import Evidence, stake_course, tunable
from equipoise.lab.storms.fitting import FitOptions, fit, standardised
from equipoise.lab.storms.labels import Label
from equipoise.lab.storms.plan import UNSEEN
from equipoise.lab.storms.recorded import Matrix, Recorded, recorded, samples_of
from equipoise.lab.storms.scoring import crossings

LATER = (0, TELLING)
"""Steps after the alarm at which the cause is asked for."""


def asked_at(run: Recorded, model: Model) -> int:
    """Return the step of the first alarm after injection, or of the onset."""
    alarms = crossings(stake_course(run, model), 1.0)
    onset = run.label.onset if run.label.onset is not None else int(run.steps[-1])
    armed = int(run.steps[min(ARMED, len(run.steps) - 1)])
    after = (alarm for alarm in alarms if alarm >= run.label.injected)
    return next(after, max(onset, armed))


def telling(run: Recorded, model: Model) -> Matrix:
    """Return the mean of the readings since the cause was asked for, at each of them.

    At least one row: the last reading before, where none follows.
    """
    step = asked_at(run, model)
    first = max(0, int(np.searchsorted(run.steps, step, side="right")) - 1)
    last = max(first + 1, int(np.searchsorted(run.steps, step + TELLING, side="right")))
    s = standardised(model.course, run)[first:last]
    means: Matrix = np.cumsum(s, 0) / np.arange(1, len(s) + 1)[:, None]
    return means


def fit_causes(runs: Sequence[Recorded], model: Model) -> Causes:
    """Return a direction per family that failed: Σ⁻¹μ, with Σ inside families."""
    failed = [r for r in runs if r.label.outcome == "failed" and len(r.steps)]
    rows: dict[str, list[Matrix]] = {}
    for run in failed:
        rows.setdefault(run.label.storm.family, []).append(telling(run, model))
    families = sorted(rows)
    means = {f: np.mean([s.mean(0) for s in rows[f]], 0) for f in families}
    spread = FitOptions().shrink * np.eye(len(NAMES))
    for family in families:
        for s in rows[family]:  # every run counts alike
            apart = s - means[family]
            spread = spread + apart.T @ apart / (len(s) * len(failed))
    return _directions(means, spread)


def _directions(means: Mapping[str, Vector], spread: Matrix) -> Causes:
    weights: dict[str, Vector] = {
        family: np.linalg.solve(spread, mean).astype(np.float64)
        for family, mean in means.items()
    }
    return Causes(
        families=list(means),
        weights=[short(w) for w in weights.values()],
        offsets=[float(f"{-0.5 * means[f] @ w:.5g}") for f, w in weights.items()],
    )


def shipped_model(found: Sequence[Label], *, last_seed: int) -> Model:
    """Return the forecast fitted on the first seeds, without the held-out families.

    What a cause looks like is fitted on all families of those seeds.
    """
    chosen = [
        recorded(label)
        for label in found
        if label.outcome != "between"
        and label.storm.seed <= last_seed
        and label.storm.tier == "small"
    ]
    model = fit(tunable(chosen, without=lambda label: False))
    return replace(model, causes=fit_causes(chosen, model))


def diagnosis(evidence: Evidence) -> dict[str, Any]:
    """Return how often cause and block are named, at the alarm and 20 steps later."""
    small = [run for run, _ in evidence.followed]
    models = {
        seed: _with_causes(model, [r for r in small if r.label.storm.seed != seed])
        for seed, model in evidence.by_seed.items()
    }
    pairs = [(r, models[r.label.storm.seed]) for r in small]
    whole = _with_causes(evidence.small, small)
    return {
        **_named([(r, m) for r, m in pairs if _is_asked(r)]),
        "fresh": _named([(r, m) for r, m in pairs if _is_asked(r) and _is_fresh(r)]),
        "deep": _named([(r, whole) for r, _ in evidence.deep if _is_asked(r)]),
    }


def _is_asked(run: Recorded) -> bool:
    return run.label.outcome == "failed" and bool(len(run.steps))


def _is_fresh(run: Recorded) -> bool:
    return run.label.storm.seed >= UNSEEN


def _with_causes(model: Model, runs: Sequence[Recorded]) -> Model:
    return replace(model, causes=fit_causes(runs, model))


def _named(pairs: Sequence[tuple[Recorded, Model]]) -> dict[str, Any]:
    each = [_each(run, model) for run, model in pairs]
    with_layer = [d for d in each if d["layer"] is not None]
    near = [d for d in with_layer if _is_near(d["named"], d["layer"])]
    wrong = Counter(
        f"{d['family']} → {d['causes'][-1]}" for d in each if d["ranks"][-1] != 1
    )
    return {
        "runs": len(each),
        "steps_after_alarm": list(LATER),
        "top1": [_share(each, place, 1) for place in range(len(LATER))],
        "top3": [_share(each, place, 3) for place in range(len(LATER))],
        "layers": len(with_layer),
        "layer_within_1": len(near) / len(with_layer) if with_layer else math.nan,
        "confused": dict(wrong.most_common()),
        "each": each,
    }


def _share(each: Sequence[Mapping[str, Any]], place: int, rank: int) -> float:
    near = [d for d in each if d["ranks"][place] <= rank]
    return len(near) / max(1, len(each))


def _each(run: Recorded, model: Model) -> dict[str, Any]:
    storm, step, causes = run.label.storm, asked_at(run, model), model.causes
    assert causes is not None
    rows = telling(run, model)
    ranked = [[name for name, _ in causes.ranked(s)] for s in (rows[0], rows[-1])]
    return {
        "family": storm.family,
        "seed": storm.seed,
        "severity": storm.severity,
        "step": step,
        "causes": [names[0] for names in ranked],
        "ranks": [
            names.index(storm.family) + 1 if storm.family in names else len(names) + 1
            for names in ranked
        ],
        "layer": run.label.layer,
        "named": _layer(run.label, model, step),
    }


def _is_near(named: int | None, layer: int) -> bool:
    return named is not None and abs(named - layer) <= 1


def _layer(label: Label, model: Model, step: int) -> int | None:
    """Return the block that the forecast names by 20 steps after the alarm."""
    if label.layer is None:
        return None
    forecaster, place = Forecaster(model), None
    for sample in samples_of(label):
        if sample.step > step + TELLING:
            break
        site = forecaster.add(sample).site
        place = sample.blocks.index(site) if site in sample.blocks else None
    return place
