"""Run an experiment: what is finished stays, what is not is made or continued."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from equipoise.lab.execution import is_finished
from equipoise.lab.experiment import Experiment, Task
from equipoise.lab.local import Failure, Watcher, run_local
from equipoise.lab.on_ray import run_on_ray
from equipoise.lab.preflight import preflight
from equipoise.lab.training import Progress

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
