"""What an experiment found: one row per arm, pairs against the first arm."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equipoise.errors import InputError
from equipoise.lab.execution import is_finished, outcome
from equipoise.lab.experiment import Experiment
from equipoise.lab.statistics import Paired, Summary, paired, summary


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm over its finished seeds."""

    arm: str
    values: Mapping[str, Summary]
    against_first: Paired | None
    """Of the experiment's first measure, over the seeds both arms finished."""
    seeds: tuple[int, ...]


def results(experiment: Experiment, root: Path) -> list[Row]:
    """Return a row per arm with at least one finished run."""
    found = _by_arm(experiment, root)
    if not any(found.values()):
        raise InputError(
            f"{experiment.name} has no finished run in {root}; "
            f"run it first: equipoise lab run {experiment.name}"
        )
    first = found[experiment.arms[0].name]
    return [
        Row(
            arm=arm,
            values=_summaries(runs, experiment.measures),
            against_first=_against(runs, first, experiment.measures[0]),
            seeds=tuple(runs),
        )
        for arm, runs in found.items()
        if runs
    ]


Runs = dict[int, dict[str, float]]


def _by_arm(experiment: Experiment, root: Path) -> dict[str, Runs]:
    found: dict[str, Runs] = {arm.name: {} for arm in experiment.arms}
    for task in experiment.tasks:
        if is_finished(root / task.folder):
            found[task.arm.name][task.seed] = outcome(root / task.folder)
    return found


def _summaries(runs: Runs, names: tuple[str, ...]) -> dict[str, Summary]:
    columns = {
        name: [run[name] for run in runs.values() if name in run] for name in names
    }
    return {name: summary(values) for name, values in columns.items() if values}


def _against(runs: Runs, first: Runs, measure: str) -> Paired | None:
    shared = [
        seed
        for seed in runs
        if measure in runs[seed] and measure in first.get(seed, {})
    ]
    if runs is first or not shared:
        return None
    return paired(
        [runs[seed][measure] for seed in shared],
        [first[seed][measure] for seed in shared],
    )
