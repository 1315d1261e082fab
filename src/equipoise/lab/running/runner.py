"""Run an experiment: what is finished stays, what is not is made or continued.

What would end every run alike, found before the first of them starts.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from equipoise.errors import EquipoiseError
from equipoise.lab.running.execution import data_of, is_finished
from equipoise.lab.running.experiment import Experiment, Task
from equipoise.lab.running.local import Failure, Watcher, run_local
from equipoise.lab.running.ray_cluster import run_on_ray
from equipoise.lab.training.options import Progress
from equipoise.watching.options import chosen


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
            chosen({"every": train.every, "at": train.at, "preset": train.preset})
        data_of(task)
    except EquipoiseError as error:
        return error
    return None


Where = Literal["local", "ray"]


def lab_directory() -> Path:
    """Return ``$EQUIPOISE_LAB``, or ``./lab``: where experiments keep their runs."""
    return Path(os.environ.get("EQUIPOISE_LAB") or "lab")


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far an experiment is."""

    done: list[Task]
    left: list[Task]


def standing(experiment: Experiment, root: Path) -> Standing:
    tasks = experiment.tasks
    done = [task for task in tasks if is_finished(root / task.folder)]
    return Standing(done=done, left=[task for task in tasks if task not in done])


def run_experiment(
    experiment: Experiment,
    root: Path,
    *,
    on: Where = "local",
    workers: int | None = None,
    watcher: Watcher | None = None,
) -> list[Failure]:
    """Make every run that is not finished; return those that failed.

    What would end all of them alike is raised before the first.
    """
    left, told = standing(experiment, root).left, watcher or _silent
    if on == "local":  # on a cluster the data may be where the runs are, and not here
        preflight(left)
    root.mkdir(parents=True, exist_ok=True)
    (root / "experiment.json").write_text(json.dumps(asdict(experiment), indent=1))
    if on == "ray":
        return run_on_ray(left, root, watcher=told)
    return run_local(left, root, workers=workers or os.cpu_count() or 1, watcher=told)


def _silent(task: Task, progress: Progress | None) -> None:
    pass
