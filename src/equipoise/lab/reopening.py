"""A model of the lab, put back from its checkpoint or from its run's folder."""

from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from equipoise.errors import InputError
from equipoise.lab import checkpoint
from equipoise.lab.data import Batch, open_data
from equipoise.lab.execution import build
from equipoise.lab.experiment import Task
from equipoise.lab.models import GPTConfig
from equipoise.store import open_run

RUN = "run.eqp"


def is_ours(path: Path) -> bool:
    """Say whether a folder is a run of the lab, or a checkpoint inside one."""
    return (path / RUN).is_file() or (path / "state.json").is_file()


def reopened(path: Path) -> tuple[nn.Module, Batch]:
    """Return the trained model and a batch it has not been trained on.

    Args:
        path: a run's folder (its newest checkpoint is taken), or ``step-00000100``.
    """
    home = path if (path / RUN).is_file() else path.parent.parent
    weights = path if home != path else _newest(path)
    if not (home / RUN).is_file():
        raise InputError(f"{path}: no {RUN} in {home}, so its shape is not known")
    task = Task.from_mapping(open_run(home / RUN).info.details["task"])
    arm = task.arm
    model = build(arm, task.seed)
    model.load_state_dict(load_file(weights / "model.safetensors"))
    context = arm.model.context if isinstance(arm.model, GPTConfig) else 0
    data = open_data(arm.data, batch=arm.train.batch, seed=task.seed, context=context)
    return model, (data.validation or data.train).take()


def _newest(run: Path) -> Path:
    found = checkpoint.finished(run / "checkpoints")
    if not found:
        raise InputError(
            f"{run} has no checkpoint: a finished experiment keeps none; train with "
            "checkpoint_every and stop before the end, or give a checkpoint's folder"
        )
    return found[-1]
