"""The smallest sweep that is still one: for trying the runner on a new cluster."""

from dataclasses import replace

from equipoise.lab.models import GPTConfig
from equipoise.lab.running.experiment import Arm, Experiment
from equipoise.lab.training.options import TrainOptions


def smoke(quick: bool) -> Experiment:
    """Two arms that take seconds."""
    shape = GPTConfig(width=16, depth=2, heads=2, context=16)
    train = TrainOptions(steps=20, batch=4, warmup=2, every=5, checkpoint_every=5)
    return Experiment(
        name="smoke",
        question="Does the sweep itself work?",
        arms=tuple(
            Arm(name=name, model=replace(shape, residual=name), train=train)
            for name in ("pre", "post")
        ),
        seeds=(1, 2) if quick else (1, 2, 3),
    )
