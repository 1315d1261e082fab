"""Experiments by name: each a function of how much time there is."""

from collections.abc import Callable
from dataclasses import replace

from equipoise.errors import InputError
from equipoise.lab.experiment import Arm, Experiment
from equipoise.lab.models import GPTConfig, gpt_preset
from equipoise.lab.training import TrainOptions

Recipe = Callable[[bool], Experiment]
"""quick → Experiment."""


def prepost(quick: bool) -> Experiment:
    """Emadi Fig. 1 and Table 1: does the place of the norm decide?"""
    train = TrainOptions(steps=150 if quick else 600, warmup=15 if quick else 60)
    shape = gpt_preset("demo")
    arms = tuple(
        Arm(name=name, model=replace(shape, residual=name), train=train)
        for name in ("pre", "post", "deepnorm")
    )
    return Experiment(
        name="prepost",
        question="Does the place of the norm decide whether a deep model trains?",
        arms=arms,
        measures=(
            "validation",
            "loss",
            "gradient_first_to_last",
            "gradient_least_to_last",
            "gradient_spread",
            "spikes",
        ),
    )


def smoke(quick: bool) -> Experiment:
    """The smallest sweep that is still one: for trying the runner."""
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


RECIPES: dict[str, Recipe] = {"prepost": prepost, "smoke": smoke}


def recipe(name: str, *, quick: bool = False) -> Experiment:
    """Return the named experiment; the quick one keeps its own results."""
    if name not in RECIPES:
        raise InputError(f"no experiment {name!r}; there are {', '.join(RECIPES)}")
    found = RECIPES[name](quick)
    return replace(found, name=f"{name}-quick") if quick else found
