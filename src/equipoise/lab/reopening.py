"""A model of the lab with data it has not seen, from its run's folder."""

from pathlib import Path

from torch import nn

from equipoise.errors import InputError
from equipoise.lab import checkpoint
from equipoise.lab.data import Batch
from equipoise.lab.execution import data_of
from equipoise.lab.kept import WEIGHTS, opened, task_of


def is_ours(path: Path) -> bool:
    """Say whether a folder is a run of the lab, or a checkpoint inside one."""
    return (path / "run.eqp").is_file() or (path / "state.json").is_file()


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
    found = checkpoint.finished(run / "checkpoints")
    if not found:
        raise InputError(
            f"{run} has no checkpoint: a finished experiment keeps none; train with "
            "checkpoint_every and stop before the end, or give a checkpoint's folder"
        )
    return found[-1]
