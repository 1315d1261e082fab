"""Saved runs of the lab, opened again: a model from its folder, with unseen data."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn

from equipoise.errors import InputError
from equipoise.lab.data import Batch
from equipoise.lab.models import GPT, ViT
from equipoise.lab.running.execution import Trained, build, data_of
from equipoise.lab.running.experiment import RESULT, Task
from equipoise.lab.training.checkpoint import finished, full_weights
from equipoise.store import open_run

WEIGHTS = "model.safetensors"


def keep(trained: Trained) -> dict[str, float]:
    """Write the weights into the run's folder; measure nothing."""
    if trained.folder is not None:
        save_file(full_weights(trained.model), trained.folder / WEIGHTS)
    return {}


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


def reopened(path: Path) -> tuple[nn.Module, Batch]:
    """Return the trained model and a batch it has not been trained on.

    Args:
        path: A run's folder, for the weights kept there or its newest checkpoint; or
            a checkpoint, ``step-00000100``.
    """
    whole = (path / WEIGHTS).is_file() or (path / "state.json").is_file()
    weights = path if whole else _newest(path)
    model, data = opened(weights), data_of(task_of(weights))
    return model, (data.validation or data.train).take()


def _newest(run: Path) -> Path:
    found = finished(run / "checkpoints")
    if not found:
        raise InputError(
            f"{run} has no checkpoint: a finished experiment keeps none; train with "
            "checkpoint_every and stop before the end, or give a checkpoint's folder"
        )
    return found[-1]
