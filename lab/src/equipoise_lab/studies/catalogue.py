"""The catalogue of studies: recipe, measurements and finding of each by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from equipoise.errors import InputError
from equipoise_lab.models import GPTConfig
from equipoise_lab.options import meant
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.finding import Finder, StudyFinding, plain
from equipoise_lab.running.execution import Measurement, keep
from equipoise_lab.running.experiment import Arm, Experiment, Task
from equipoise_lab.studies import (
    convergence,
    curvature,
    depth,
    exponents,
    prepost,
    rates,
    sizes,
    temperature,
    variants,
)
from equipoise_lab.studies.fragility import finding as fragility
from equipoise_lab.studies.fragility import runner
from equipoise_lab.studies.selection import normalisers, paper, paper_finding
from equipoise_lab.training.options import TrainOptions

FRAGILITY = "fragility"
"""A sweep of its own kind, ``studies.fragility.runner.Study``, beside the recipes."""

STORMS = "storms"
"""The benchmark of instability, ``lab.storms``."""

Recipe = Callable[[bool], Experiment]
"""quick → Experiment."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: the runs that answer it, what is measured, what they say."""

    recipe: Recipe | None = None
    """None: evidence comes from elsewhere, and only the finding is ours."""
    measurements: Mapping[str, Measurement] = field(default_factory=dict)
    """By the name an arm's ``judges`` give."""
    finding: Finder = plain
    """Its table, unless there is more to say."""


def smoke(quick: bool) -> Experiment:
    """Two arms that take seconds: for trying the runner on a new cluster."""
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


QUESTIONS: dict[str, Question] = {
    "prepost": Question(recipe=prepost.recipe, finding=prepost.finding),
    "demo": Question(finding=prepost.finding),
    "temperature": Question(recipe=temperature.recipe, finding=temperature.finding),
    "exponents": Question(recipe=exponents.recipe, finding=exponents.finding),
    "rmsnorm": Question(recipe=variants.rmsnorm_recipe, finding=variants.finding),
    "experts": Question(recipe=variants.experts_recipe, finding=variants.finding),
    "sharpening": Question(
        recipe=depth.sharpening_recipe,
        measurements={"positions": depth.positions},
        finding=depth.sharpening_finding,
    ),
    "prepost-sizes": Question(recipe=sizes.prepost_recipe, finding=sizes.finding),
    "exponents-sizes": Question(
        recipe=sizes.exponents_recipe, finding=sizes.exponents_finding
    ),
    "sharpening-sizes": Question(recipe=sizes.sharpening_recipe, finding=sizes.finding),
    "vanishing": Question(
        recipe=depth.vanishing_recipe, finding=depth.vanishing_finding
    ),
    "rates": Question(
        recipe=rates.recipe,
        measurements={"sharpness": rates.sharpness},
        finding=rates.finding,
    ),
    "precision": Question(recipe=runner.precision),
    "convergence": Question(
        recipe=convergence.recipe,
        measurements={"convergence": convergence.measure},
        finding=convergence.finding,
    ),
    "curvature": Question(
        recipe=curvature.recipe,
        measurements={"curvature": curvature.measure, "entries": curvature.entries},
        finding=curvature.finding,
    ),
    "selection": Question(
        recipe=normalisers.recipe,
        measurements={"selection": normalisers.measure, "kept": keep},
        finding=normalisers.finding,
    ),
    "smoke": Question(recipe=smoke),
    paper.NAME: Question(finding=paper_finding.finding),
    "theorem": Question(finding=prepost.theorem_finding),
    FRAGILITY: Question(finding=fragility.finding),
}
RECIPES = {name: one.recipe for name, one in QUESTIONS.items() if one.recipe}
MEASUREMENTS = {
    name: measure
    for one in QUESTIONS.values()
    for name, measure in one.measurements.items()
}
REPORTS = (
    "prepost",
    "prepost-sizes",
    "temperature",
    "vanishing",
    "sharpening",
    "sharpening-sizes",
    "rates",
    "exponents",
    "exponents-sizes",
    "rmsnorm",
    "experts",
    "selection",
    "curvature",
    "convergence",
)
"""What ``equipoise lab run all`` makes, in the order of what is asked first."""


def recipe(name: str, *, quick: bool = False) -> Experiment:
    """Return the named experiment; the quick one has results of its own."""
    if name not in RECIPES:
        raise InputError(
            f"no experiment {name!r}"
            f"{meant(name, (*RECIPES, FRAGILITY, STORMS, paper.NAME, 'theorem'))}"
        )
    experiment = RECIPES[name](quick)
    return replace(experiment, name=f"{name}-quick") if quick else experiment


def measurements_of(tasks: Sequence[Task]) -> dict[str, Measurement]:
    """Return the measurements that the arms name; an unknown name is refused."""
    names = dict.fromkeys(name for task in tasks for name in task.arm.judges)
    for name in names:
        if name not in MEASUREMENTS:
            raise InputError(f"no measurement {name!r}{meant(name, (*MEASUREMENTS,))}")
    return {name: MEASUREMENTS[name] for name in names}


def finding(evidence: Evidence) -> StudyFinding:
    """Return what the evidence says; its table, where no study says more."""
    question = QUESTIONS.get(evidence.name.removesuffix("-quick"), Question())
    return question.finding(evidence)
