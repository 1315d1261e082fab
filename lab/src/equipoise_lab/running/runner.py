"""Run an experiment: what is finished stays, what is not is made or continued.

What would end every run alike is found before the first of them starts.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.watching.options import read_options
from equipoise_lab.running.execution import data_of, execute
from equipoise_lab.running.experiment import Experiment, Task
from equipoise_lab.running.workers import Failure, Where, run_jobs, standing
from equipoise_lab.studies.catalogue import measurements_of


def preflight(tasks: Sequence[Task]) -> None:
    """Raise what stops all of the runs; an arm that is alone in failing may do so.

    Looked at are the settings that watching takes from the environment and from
    ``equipoise.toml``, and the data.
    """
    by_arm = {task.arm.name: task for task in tasks}
    faults = [_fault(task) for task in by_arm.values()]
    if faults and all(faults):
        raise faults[0]  # type: ignore[misc]


def _fault(task: Task) -> EquipoiseError | None:
    train = task.arm.train
    try:
        if train.watch:
            read_options({"every": train.every, "at": train.at, "preset": train.preset})
        data_of(task)
    except EquipoiseError as error:
        return error
    return None


def lab_directory() -> Path:
    """Return where runs of experiments are: ``$EQUIPOISE_LAB`` or ``./lab-runs``."""
    return Path(os.environ.get("EQUIPOISE_LAB") or "lab-runs")


def run_experiment(
    experiment: Experiment, root: Path, *, on: Where = "local", **options: Any
) -> list[Failure]:
    """Make every run that is not finished; return those that failed.

    What would end all of them alike is raised before the first; ``workers`` and
    ``watcher`` are those of ``run_jobs``.
    """
    tasks = experiment.tasks
    make = partial(execute, measurements=measurements_of(tasks))
    if on == "local":  # on a cluster the data may be where the runs are, and not here
        preflight(standing(tasks, root).left)
    root.mkdir(parents=True, exist_ok=True)
    (root / "experiment.json").write_text(json.dumps(asdict(experiment), indent=1))
    return run_jobs(tasks, root, make, on=on, **options)
