"""The weights of a finished run, kept beside its result and opened again by name."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from equipoise.errors import InputError
from equipoise.lab import checkpoint
from equipoise.lab.execution import RESULT, build
from equipoise.lab.experiment import Task
from equipoise.lab.judges import Trained
from equipoise.lab.models import GPT, ViT
from equipoise.store import open_run

WEIGHTS = "model.safetensors"


def keep(trained: Trained) -> None:
    """Write the weights into the run's folder."""
    if trained.folder is not None:
        save_file(checkpoint.whole_weights(trained.model), trained.folder / WEIGHTS)


def is_lab_run(folder: Path) -> bool:
    """Return whether a folder is a run of the lab, or a checkpoint inside one."""
    return (folder / WEIGHTS).is_file() and _run_of(folder) is not None


def opened(folder: Path) -> GPT | ViT:
    """Return the model of a run whose weights were kept, or of one of its checkpoints.

    Args:
        folder: ``lab/selection/softmax/seed-42-…``, or ``…/checkpoints/step-00000100``.
    """
    task = task_of(folder)
    model = build(task.arm, task.seed)
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model.eval()


def task_of(folder: Path) -> Task:
    """Return what was trained in a folder that has weights."""
    run = _run_of(folder)
    if run is None or not (folder / WEIGHTS).is_file():
        raise InputError(
            f"{folder} is no run with weights: it needs {WEIGHTS}, and a {RESULT} or "
            "run.eqp here or two folders up"
        )
    if (run / RESULT).is_file():
        return Task.from_mapping(json.loads((run / RESULT).read_text())["task"])
    return Task.from_mapping(open_run(run / "run.eqp").info.details["task"])


def _run_of(folder: Path) -> Path | None:
    places = (folder, folder.resolve().parent.parent)
    found = (p for p in places if (p / RESULT).is_file() or (p / "run.eqp").is_file())
    return next(found, None)
