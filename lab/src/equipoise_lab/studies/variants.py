"""Variants of a part, RMSNorm and experts, compared within each residual form."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from equipoise_lab.models import GPTConfig
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.finding import (
    Row,
    StudyFinding,
    against,
    baseline,
    measured,
    over_depth,
    over_training,
    rows,
)
from equipoise_lab.results.statistics import to_decide
from equipoise_lab.running.experiment import FIVE_SEEDS, SEEDS, Arm, Experiment
from equipoise_lab.training.options import TrainOptions

SHAPE = GPTConfig(width=64, depth=6, heads=4, context=32)
DEEP = GPTConfig(width=64, depth=16, heads=4, context=64)
GRADIENTS = ("gradient_least_to_last", "gradient_spread")


def rmsnorm_recipe(quick: bool) -> Experiment:
    """(c) Does RMSNorm change the picture?"""
    models = {norm: replace(DEEP, norm=norm) for norm in ("layernorm", "rmsnorm")}
    more = (*GRADIENTS, "S_residual", "theta_p5", "token_cosine")
    return Experiment(
        name="rmsnorm",
        question="Does RMSNorm vanish, carry and train as LayerNorm does?",
        measures=("validation", "loss", *more),
        **_within_residuals(models, quick),
    )


def experts_recipe(quick: bool) -> Experiment:
    """(d) Does a mixture of experts change stability?"""
    models = {
        str(count or "dense"): replace(SHAPE, experts=count, ffn_width=128)
        for count in ((0, 4) if quick else (0, 4, 8))
    }
    return Experiment(
        name="experts",
        question="Does a mixture of experts change who trains?",
        measures=("validation", "loss", "spikes", *GRADIENTS, "S_residual", "theta_p5"),
        **_within_residuals(models, quick),
    )


def _within_residuals(models: Mapping[str, GPTConfig], quick: bool) -> dict[str, Any]:
    """Return arms of every model in both forms, compared with the first of the form."""
    train = TrainOptions(steps=40 if quick else 60, warmup=10, every=20, lr=2e-3)
    first = next(iter(models))
    arms = tuple(
        Arm(name=f"{form}-{name}", model=replace(model, residual=form), train=train)
        for form in ("pre", "post")
        for name, model in models.items()
    )
    baselines = {a.name: f"{a.model.residual}-{first}" for a in arms}
    curves = ("loss", "gradient.norm")
    seeds = SEEDS if quick else FIVE_SEEDS
    return {"arms": arms, "baselines": baselines, "curves": curves, "seeds": seeds}


SMALL = 0.01
"""Nats: a difference below this does not matter, however steady it is."""
EXPLORATORY = "Intervals of gradient ratios are exploratory: not corrected."
SAME = 1.2
"""A ratio whose whole interval is within this factor of 1 says: the same, however
steady the rest of it is."""


def finding(evidence: Evidence) -> StudyFinding:
    """Compare each arm with its baseline: loss by interval, gradients by pattern."""
    found = rows(evidence)
    by_arm = {row.arm: row for row in found}
    parts = [
        _sentence(evidence, row, by_arm[baseline(evidence, row.arm)])
        for row in found
        if row.against_first is not None and baseline(evidence, row.arm) in by_arm
    ]
    figures = [
        over_training(evidence, "loss", title="Training loss", y="nats per token"),
        over_depth(evidence, "gradient.norm", title="Gradient by layer", log=True),
    ]
    return StudyFinding(
        verdict=" ".join([*parts, EXPLORATORY]) if parts else "nothing to compare yet.",
        grids=[measured(evidence, found)],
        figures=[figure for figure in figures if figure.lines],
    )


def _sentence(evidence: Evidence, row: Row, other: Row) -> str:
    pair = row.against_first
    assert pair is not None
    if max(abs(pair.low), abs(pair.high)) < SMALL:
        loss = "ends within a hundredth of a nat"
    elif pair.low > 0:
        loss = "ends higher"
    elif pair.high < 0:
        loss = "ends lower"
    else:
        loss = f"losses cannot be told apart{to_decide(pair)}"
    return (
        f"{row.arm} against {other.arm}: {loss}: {pair.mean:+.3f} nats "
        f"[{pair.low:+.3f}, {pair.high:+.3f}]; {_gradients(evidence, row, other)}."
    )


def _gradients(evidence: Evidence, row: Row, other: Row) -> str:
    """Compare the weakest layer's share of the gradient as a ratio with its interval.

    A mean below a limit beside one above it says nothing when seeds overlap.
    """
    measure = "gradient_least_to_last"
    least = [one.values.get(measure) for one in (row, other)]
    if least[0] is None or least[1] is None:
        return "gradients were not recorded"
    pair = against(evidence, (row.arm, other.arm), measure, change=math.log)
    assert pair is not None
    words = f"weakest ÷ last gradient {least[0].mean:.2g} and {least[1].mean:.2g}"
    ratio, low, high = (math.exp(x) for x in (pair.mean, pair.low, pair.high))
    shown = f"{words}, ratio {ratio:.3g} [{low:.3g}, {high:.3g}]"
    if max(high, 1 / low) < SAME:
        return f"{shown}: the same"
    if not low <= 1 <= high:
        return f"{shown}: different"
    return f"{shown}: cannot be told apart{to_decide(pair)}"
