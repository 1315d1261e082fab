"""Variants of a part, RMSNorm and experts, compared within each residual form."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from equipoise.lab.models import GPTConfig
from equipoise.lab.results.evidence import Evidence
from equipoise.lab.results.finding import (
    Finding,
    Row,
    baseline,
    measured,
    over_depth,
    over_training,
    rows,
)
from equipoise.lab.running.experiment import Arm, Experiment
from equipoise.lab.training.options import TrainOptions

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
    return {"arms": arms, "baselines": baselines, "curves": curves}


VANISHED = 1e-3
SMALL = 0.01
"""Nats: a difference below this does not matter, however steady it is."""


def finding(evidence: Evidence) -> Finding:
    """Compare each arm with its baseline: loss by interval, gradients by pattern."""
    found = rows(evidence)
    by_arm = {row.arm: row for row in found}
    parts = [
        _sentence(row, by_arm[baseline(evidence, row.arm)])
        for row in found
        if row.against_first is not None and baseline(evidence, row.arm) in by_arm
    ]
    figures = [
        over_training(evidence, "loss", title="Training loss", y="nats per token"),
        over_depth(evidence, "gradient.norm", title="Gradient by layer", log=True),
    ]
    return Finding(
        verdict=" ".join(parts) or "nothing to compare yet.",
        grids=[measured(evidence, found)],
        figures=[figure for figure in figures if figure.lines],
    )


def _sentence(row: Row, other: Row) -> str:
    pair = row.against_first
    assert pair is not None
    if abs(pair.mean) < SMALL:
        loss = "ends within a hundredth of a nat"
    elif pair.low > 0:
        loss = "ends higher"
    elif pair.high < 0:
        loss = "ends lower"
    else:
        loss = "ends no differently"
    return (
        f"{row.arm} against {other.arm}: {loss} ({pair.mean:+.3f} nats "
        f"[{pair.low:+.3f}, {pair.high:+.3f}]); its gradients {_pattern(row)}, "
        f"{other.arm}'s {_pattern(other)}."
    )


def _pattern(row: Row) -> str:
    least = row.values.get("gradient_least_to_last")
    if least is None:
        return "were not recorded"
    word = "vanish" if least.mean < VANISHED else "do not vanish"
    return f"{word} (weakest ÷ last {least.mean:.2g})"
