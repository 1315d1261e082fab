"""Experiments by name: each a function of how much time there is."""

from collections.abc import Callable
from dataclasses import replace

from equipoise.errors import InputError
from equipoise.lab.options import meant
from equipoise.lab.running.experiment import Experiment
from equipoise.lab.studies import questions, smoke, thresholds
from equipoise.lab.studies.convergence import recipe as convergence
from equipoise.lab.studies.curvature import recipe as curvature
from equipoise.lab.studies.fragility import recipe as fragility
from equipoise.lab.studies.prepost import recipe as paper
from equipoise.lab.studies.selection import recipe as selection

FRAGILITY = "fragility"
"""A study of its own kind, ``lab.fragility_study``, beside the recipes."""

Recipe = Callable[[bool], Experiment]
"""quick → Experiment."""

RECIPES: dict[str, Recipe] = {
    "prepost": paper.prepost,
    "temperature": questions.temperature,
    "exponents": thresholds.exponents,
    "rmsnorm": questions.rmsnorm,
    "experts": questions.experts,
    "sharpening": questions.sharpening,
    "vanishing": questions.vanishing,
    "rates": thresholds.rates,
    "precision": fragility.precision,
    "convergence": convergence.convergence,
    "curvature": curvature.curvature,
    "selection": selection.selection,
    "smoke": smoke.smoke,
}

REPORTS = (
    "prepost",
    "temperature",
    "vanishing",
    "sharpening",
    "rates",
    "exponents",
    "rmsnorm",
    "experts",
    "selection",
    "curvature",
    "convergence",
)
"""What ``equipoise lab run all`` makes, in the order of what is asked first."""


def recipe(name: str, *, quick: bool = False) -> Experiment:
    """Return the named experiment; the quick one keeps its own results."""
    if name not in RECIPES:
        raise InputError(f"no experiment {name!r}{meant(name, (*RECIPES, FRAGILITY))}")
    found = RECIPES[name](quick)
    return replace(found, name=f"{name}-quick") if quick else found
