"""The largest stable learning rate and decay: can a run's start tell them?"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from equipoise.auditing.curvature import edge_of_stability
from equipoise.numerics.spectra.estimate import Search
from equipoise_lab.models import GPTConfig
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.figures import Figure, FigureLine, chart
from equipoise_lab.results.finding import StudyFinding, StudyGrid
from equipoise_lab.results.statistics import (
    paired,
    rank_correlation,
    summary,
    to_decide,
)
from equipoise_lab.running.execution import TrainedModel
from equipoise_lab.running.experiment import Arm, Experiment
from equipoise_lab.studies.exponents import edge
from equipoise_lab.training.options import TrainOptions

SHAPE = GPTConfig(width=64, depth=4, heads=4, context=32)
SHAPES = {
    "pre": SHAPE,
    "post": replace(SHAPE, residual="post"),
    "gain-half": replace(SHAPE, gain=0.5),
    "gain-2": replace(SHAPE, gain=2.0),
    "gain-3": replace(SHAPE, gain=3.0),
    "deep": replace(SHAPE, depth=12),
    "qk-norm": replace(SHAPE, qk_norm=True),
    "sandwich": replace(SHAPE, residual="sandwich"),
}


RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)


DECAYS = (1.0, 10.0, 30.0, 100.0)


def recipe(quick: bool) -> Experiment:
    """(g) Can the largest stable learning rate be told from the start of a run?

    Per shape: a sweep of rates, one of weight decays, and two short runs at a small
    rate in which the candidates for a prediction are measured, at init and at step 50.
    """
    train = TrainOptions(steps=60, warmup=5, batch=4, watch=False, give_up=6.5)
    kept = ("pre", "post", "gain-2") if quick else tuple(SHAPES)
    tried, decays = (RATES[::2], DECAYS[::2]) if quick else (RATES, DECAYS)
    arms = []
    for name in kept:
        shape = SHAPES[name]
        arms += [
            Arm(name=f"{name}-lr{lr:g}", model=shape, train=replace(train, lr=lr))
            for lr in tried
        ]
        arms += [
            Arm(
                name=f"{name}-wd{decay:g}",
                model=shape,
                train=replace(train, lr=3e-3, weight_decay=decay),
            )
            for decay in decays
        ]
        arms += [_predictors(name, shape, steps) for steps in (1, 50)]
    return Experiment(
        name="rates",
        question="Can the largest stable learning rate be told from the start?",
        arms=tuple(arms),
        measures=(
            "validation",
            "S",
            "S_residual",
            "lipschitz",
            "sharpness",
        ),
    )


def _predictors(name: str, shape: GPTConfig, steps: int) -> Arm:
    train = TrainOptions(
        steps=steps, warmup=1, batch=4, preset="deep", every=10**6, at=(steps - 1,)
    )
    return Arm(
        name=f"{name}-at{steps}", model=shape, train=train, judges=("sharpness",)
    )


SEARCH = Search(tolerance=0.02, failure=None, at_most=60)


def sharpness(trained: TrainedModel) -> dict[str, float]:
    """Return λ_max of D^(-1/2) H D^(-1/2), D = Adam's √v̂ + ε: its own geometry.

    Adam with momentum β₁ is stable on a quadratic while lr · λ < (2 + 2β₁)/(1 - β₁).
    """
    found = edge_of_stability(
        trained.model, trained.batch, trained.optimizer, search=SEARCH
    ).value
    return {"sharpness": found.value, "sharpness_error": found.error}


WITHIN = 0.15
"""Nats above the shape's best that still count as training."""
MOMENTUM = 0.9
LIMIT = (2 + 2 * MOMENTUM) / (1 - MOMENTUM)
"""Adam on a quadratic is stable while lr · λ is below this (Cohen et al. 2022)."""
PREDICTORS = {
    "S": "S, median over layers",
    "S_residual": "S on the residual stream",
    "lipschitz": "our local constant",
    "sharpness": "preconditioned sharpness",
}
WHEN = {1: "init", 50: "step 50"}
SWEEPS = {"lr": "learning rate", "wd": "weight decay"}


@dataclass(frozen=True, kw_only=True)
class RateScore:
    """How well one number, read early, tells the edge of a sweep over shapes."""

    rank: list[float]
    """Spearman's ρ per seed; a true limit falls as the number grows: -1 is best."""
    factor: list[float]
    """Per seed, the geometric mean factor by which c / number misses the edge, with
    c fitted to the other shapes."""
    shapes: int


def finding(evidence: Evidence) -> StudyFinding:
    """Score every predictor against both sweeps."""
    scores = {
        (sweep, name, step): score(evidence, sweep, name, step)
        for sweep in SWEEPS
        for name in PREDICTORS
        for step in WHEN
    }
    return StudyFinding(
        verdict=" ".join(_sentence(evidence, scores, sweep) for sweep in SWEEPS),
        grids=[_edges(evidence), *(_table(evidence, scores, s) for s in SWEEPS)],
        figures=[_figure(evidence)],
    )


def shapes(evidence: Evidence) -> list[str]:
    """Return the shapes that were swept."""
    return list(dict.fromkeys(arm.rsplit("-", 1)[0] for arm in evidence.runs))


def edges(evidence: Evidence, sweep: str, seed: int) -> dict[str, float]:
    """Return shape → largest setting that trains, of those that have an edge."""
    found = {}
    for shape in shapes(evidence):
        losses = {
            float(arm.removeprefix(f"{shape}-{sweep}")): evidence.value(
                arm, seed, "validation"
            )
            for arm in evidence.runs
            if arm.startswith(f"{shape}-{sweep}")
        }
        if sweep == "wd":
            rate = f"{shape}-lr0.003"  # the same run with its ordinary decay of 0.1
            losses[0.1] = evidence.value(rate, seed, "validation")
        value = edge(losses, within=WITHIN)
        if math.isfinite(value):
            found[shape] = value
    return found


def score(evidence: Evidence, sweep: str, name: str, step: int) -> RateScore:
    """Return rank correlation and factor error, seed by seed."""
    rank, factor, count = [], [], 0
    for seed in evidence.seeds:
        limits = edges(evidence, sweep, seed)
        early = {s: evidence.value(f"{s}-at{step}", seed, name) for s in limits}
        known = [s for s in limits if early[s] > 0 and math.isfinite(early[s])]
        count = max(count, len(known))
        rank.append(
            rank_correlation([early[s] for s in known], [limits[s] for s in known])
        )
        factor.append(left_out({s: limits[s] for s in known}, early))
    return RateScore(rank=rank, factor=factor, shapes=count)


def left_out(limits: Mapping[str, float], early: Mapping[str, float] | None) -> float:
    """Return the mean factor error of c / early (or of c), c from the other shapes.

    >>> limits = {"a": 1.0, "b": 2.0, "c": 4.0}
    >>> round(left_out(limits, {"a": 8.0, "b": 4.0, "c": 2.0}), 3)
    1.0
    >>> round(left_out({"a": 1.0, "b": 4.0}, None), 3)
    4.0
    """
    if len(limits) < 2:
        return math.nan
    logs = {
        s: math.log(limit) + (math.log(early[s]) if early else 0.0)
        for s, limit in limits.items()
    }
    total = math.fsum(logs.values())
    misses = [abs(v - (total - v) / (len(logs) - 1)) for v in logs.values()]
    return math.exp(statistics.fmean(misses))


def _constant(evidence: Evidence, sweep: str) -> list[float]:
    return [left_out(edges(evidence, sweep, seed), None) for seed in evidence.seeds]


Scores = Mapping[tuple[str, str, int], RateScore]


def _sentence(evidence: Evidence, scores: Scores, sweep: str) -> str:
    plain = statistics.fmean(_constant(evidence, sweep))
    mine = {key: s for key, s in scores.items() if key[0] == sweep}
    known = {k: s for k, s in mine.items() if all(map(math.isfinite, s.factor))}
    if not known or not math.isfinite(plain):
        return f"Largest {SWEEPS[sweep]}: too few shapes have an edge."
    best = min(known, key=lambda k: statistics.fmean(known[k].factor))
    error = statistics.fmean(known[best].factor)
    pair = paired(
        [math.log(f) for f in known[best].factor],
        [math.log(f) for f in _constant(evidence, sweep)],
    )
    answer = "can" if pair.high < 0 else "cannot"
    ratio, low, high = (math.exp(x) for x in (pair.mean, pair.low, pair.high))
    return (
        f"The largest {SWEEPS[sweep]} {answer} be told from these numbers: the best, "
        f"{PREDICTORS[best[1]]} at {WHEN[best[2]]}, misses by a factor of {error:.2f} "
        f"(rank correlation {statistics.fmean(known[best].rank):+.2f}), one rate for "
        f"all shapes by {plain:.2f}: ratio {ratio:.2f} [{low:.2f}, {high:.2f}]"
        f"{to_decide(pair)}; the best of {len(known)} readings, so exploratory."
    )


def _edges(evidence: Evidence) -> StudyGrid:
    cells = []
    for shape in shapes(evidence):
        row = [shape]
        for sweep in SWEEPS:
            found = [edges(evidence, sweep, s).get(shape) for s in evidence.seeds]
            known = [v for v in found if v is not None]
            row.append(f"{summary(known)} ({len(known)})" if known else "none found")
        for name in PREDICTORS:
            row += [_early(evidence, shape, name, step) for step in WHEN]
        cells.append(row)
    head = ["shape", *(f"largest {word} (seeds)" for word in SWEEPS.values())]
    head += [
        f"{name}, {when}" for name in PREDICTORS.values() for when in WHEN.values()
    ]
    return StudyGrid(
        title="What trains, and what was read early", head=head, cells=cells
    )


def _early(evidence: Evidence, shape: str, name: str, step: int) -> str:
    arm = f"{shape}-at{step}"
    found = [evidence.value(arm, seed, name) for seed in evidence.seeds]
    known = [v for v in found if math.isfinite(v)]
    return f"{statistics.fmean(known):.3g}" if known else "–"


def _table(evidence: Evidence, scores: Scores, sweep: str) -> StudyGrid:
    cells = [
        [
            f"{PREDICTORS[name]}, {WHEN[step]}",
            str(summary(found.rank)),
            str(summary(found.factor)),
            str(found.shapes),
        ]
        for (which, name, step), found in scores.items()
        if which == sweep
    ]
    plain = summary(_constant(evidence, sweep))
    cells.append(["one setting for all shapes", "–", str(plain), "–"])
    if sweep == "lr":
        cells += [_absolute(evidence, step) for step in WHEN]
    return StudyGrid(
        title=f"Telling the largest {SWEEPS[sweep]}: Spearman's ρ (a limit would give "
        "-1) and factor error, mean ± sd over seeds",
        head=["read early", "rank correlation", "factor error", "shapes"],
        cells=cells,
    )


def _absolute(evidence: Evidence, step: int) -> list[str]:
    """Nothing fitted: the rate at which Adam leaves a quadratic of that sharpness."""
    found = []
    for seed in evidence.seeds:
        limits = edges(evidence, "lr", seed)
        misses = [
            abs(math.log(LIMIT / top / limit))
            for shape, limit in limits.items()
            if (top := evidence.value(f"{shape}-at{step}", seed, "sharpness")) > 0
        ]
        found.append(math.exp(statistics.fmean(misses)) if misses else math.nan)
    text = f"{LIMIT:.0f} ÷ preconditioned sharpness, {WHEN[step]}, nothing fitted"
    return [text, "–", str(summary(found)), "–"]


def _figure(evidence: Evidence) -> Figure:
    lines = [
        FigureLine(
            name=shape, x=tried, y=[_loss(evidence, shape, rate) for rate in tried]
        )
        for shape in shapes(evidence)
        if (tried := _tried(evidence, shape))
    ]
    title = "Held-out loss over learning rate, mean over seeds"
    return chart("loss-over-rate", title, lines, x="learning rate", y="nats", log="x")


def _tried(evidence: Evidence, shape: str) -> list[float]:
    prefix = f"{shape}-lr"
    return [
        float(a.removeprefix(prefix)) for a in evidence.runs if a.startswith(prefix)
    ]


def _loss(evidence: Evidence, shape: str, rate: float) -> float:
    # Beyond four nats a run is lost, and how far is of no interest.
    return min(4.0, evidence.mean(f"{shape}-lr{rate:g}", "validation"))
