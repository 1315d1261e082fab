"""Softmax and its rivals, each in a model trained from scratch, at growing contexts."""

from equipoise.lab.models import GPTConfig
from equipoise.lab.running.experiment import Arm, Experiment
from equipoise.lab.studies.selection.measurement import MULTIPLES
from equipoise.lab.studies.selection.normaliser_arms import RIVALS
from equipoise.lab.training.options import TrainOptions

SHAPE = GPTConfig(width=64, depth=2, heads=4, context=64, positions="rope")
QUICK = ("softmax", "ssmax", "entmax15", "sink-learnt")
# Left out for its cost, one arm more; its fixed form stands in. Not a finding.
LEFT_OUT = {"adaptive-temperature-learnt"}


def selection(quick: bool) -> Experiment:
    """Which normaliser still selects when the context is longer than in training?"""
    names = QUICK if quick else tuple(n for n in RIVALS if n not in LEFT_OUT)
    train = TrainOptions(steps=60 if quick else 240, lr=3e-3, warmup=24, watch=False)
    return Experiment(
        name="selection",
        question="Which normaliser still selects when the context grows?",
        arms=tuple(
            Arm(
                name=name,
                model=SHAPE,
                train=train,
                normaliser=name,
                judges=("selection", "kept"),
            )
            for name in names
        ),
        seeds=(42, 123) if quick else (42, 123, 456),
        measures=(
            *(f"loss_{m}x" for m in MULTIPLES),
            "loss",
            "spikes",
            *(
                f"{name}_{m}x"
                for name in (
                    *("theta", "theta_width", "total", "peak", "keys", "zeros", "rho"),
                    *("recall", "recall_random", "cosine", "cosine_random", "distance"),
                )
                for m in MULTIPLES
            ),
        ),
    )
