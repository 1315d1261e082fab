"""Emadi's experiment at our scale: same depth order, operator norms kept."""

from dataclasses import replace

from equipoise.lab.models import gpt_preset
from equipoise.lab.running.experiment import Arm, Experiment
from equipoise.lab.training.options import TrainOptions


def prepost(quick: bool) -> Experiment:
    """Figs 1, 2, 4, 5, 6 and Table 1: one set of runs, read in several ways."""
    train = (
        TrainOptions(steps=150, warmup=15)
        if quick
        else TrainOptions(steps=240, warmup=24, every=20)
    )
    arms = tuple(
        Arm(name=name, model=replace(gpt_preset("demo"), residual=name), train=train)
        for name in ("pre", "post", "deepnorm")
    )
    return Experiment(
        name="prepost",
        question="Does the place of the norm decide whether a deep model trains?",
        arms=arms,
        curves=(
            "loss",
            "gradient.norm",
            "projection.G",
            "attention.theta.p5",
            "attention.theta.p50",
            "sensitivity.S_residual",
        ),
        measures=(
            "validation",
            "loss",
            "spikes",
            "gradient_first_to_last",
            "gradient_least_to_last",
            "gradient_spread",
            "theta_p5",
            "theta_p50",
            "S_residual",
            "S_residual_cv",
            "S_residual_slope",
            "growth_G",
            "growth_B2",
        ),
    )
