"""Execute one run: build, train, measure and save a model; open a saved one again."""

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from equipoise.errors import InputError
from equipoise.numerics.normalisers import NORMALISERS, Normaliser
from equipoise.numerics.normalisers.closed_form import Softmax
from equipoise.remedies.normaliser import (
    ATTRIBUTE,
    LEARNABLE,
    NormaliserModule,
    NormaliserSwap,
)
from equipoise.store import open_run
from equipoise_lab.data import Batch, Batches, Dataset, open_data
from equipoise_lab.models import GPT, GPTConfig, ViT
from equipoise_lab.results.measures import curve_measures, measures
from equipoise_lab.running.experiment import RESULT, Arm, Task
from equipoise_lab.training.checkpoint import finished, full_weights
from equipoise_lab.training.distributed import device
from equipoise_lab.training.options import TrainResult
from equipoise_lab.training.trainer import Listener, Trainer

VALIDATION_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model at the end of its run, and data it has not seen."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch
    seen: Batches | None = None
    """What it was trained on, from where training stopped."""
    folder: Path | None = None
    """Where a measurement may write a picture."""


Measurement = Callable[[TrainedModel], dict[str, float]]
"""What else is measured of a model when its run is over: name → number."""


def execute(
    task: Task,
    root: Path,
    listener: Listener | None = None,
    *,
    measurements: Mapping[str, Measurement] | None = None,
) -> dict[str, float]:
    """Return the measures of a run; one that is finished is read, not repeated.

    Args:
        task: The arm and its seed.
        root: The experiment's folder.
        listener: Called with the progress every ten steps.
        measurements: Those that ``task.arm.judges`` names.
    """
    folder = root / task.folder
    if is_finished(folder):
        return outcome(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arm, data = task.arm, data_of(task)
    trainer = Trainer(
        build(arm, task.seed),
        data.train,
        arm.train,
        folder=folder,
        info={**data.info, "task": task.to_mapping()},
        listener=listener,
    )
    start = time.process_time()
    result = trainer.run()
    found = _end_of(result, trainer.model, data.validation)
    for name in arm.judges:
        trained = TrainedModel(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch=(data.validation or data.train).take(),
            seen=data.train,
            folder=folder,
        )
        found |= _measurement(name, measurements or {})(trained)
    found["cpu_seconds"] = time.process_time() - start
    _write(folder, task, found, result)
    return outcome(folder)


def _measurement(name: str, given: Mapping[str, Measurement]) -> Measurement:
    if name not in given:
        known = ", ".join(given) or "none"
        raise InputError(f"no measurement {name!r}; there are {known}")
    return given[name]


def data_of(task: Task) -> Dataset:
    """Return the batches a run is trained on and evaluated with."""
    arm = task.arm
    context = arm.model.context if isinstance(arm.model, GPTConfig) else 0
    return open_data(arm.data, batch=arm.train.batch, seed=task.seed, context=context)


def build(arm: Arm, seed: int) -> GPT | ViT:
    """Return the arm's model with the seed's weights."""
    torch.manual_seed(seed)
    model = GPT(arm.model) if isinstance(arm.model, GPTConfig) else ViT(arm.model)
    if arm.normaliser:
        set_normaliser(model, arm.normaliser)
    return model


def is_finished(folder: Path) -> bool:
    return (folder / RESULT).is_file()


def outcome(folder: Path) -> dict[str, float]:
    """Return what a finished run came to.

    What the run file holds is read anew, so a measure thought of later costs no run.
    """
    record = json.loads((folder / RESULT).read_text())
    found: dict[str, float] = record["measures"] | curve_measures(record)
    run = folder / "run.eqp"
    return found | measures(run) if run.is_file() else found


def _end_of(
    result: TrainResult, model: nn.Module, validation: Batches | None
) -> dict[str, float]:
    found: dict[str, float] = {
        "loss": result.loss,
        "spikes": result.spikes,
        "spike_score": result.spike_score,
        "gradient_spikes": result.gradient_spikes,
        "tokens": result.tokens,
        "seconds": result.seconds,
    }
    if validation is not None:
        found |= evaluate(model, validation)
    return found


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Batches, *, count: int = VALIDATION_BATCHES
) -> dict[str, float]:
    """Return nats per target and accuracy over the next ``count`` batches."""
    model.eval()
    losses, hits = [], []
    for _ in range(count):
        x, y = (t.to(device()) for t in batches.take())
        logits = model(x).flatten(0, -2)
        losses.append(F.cross_entropy(logits.float(), y.flatten()).item())
        hits.append((logits.argmax(-1) == y.flatten()).double().mean().item())
    model.train()
    return {
        "validation": math.fsum(losses) / count,
        "accuracy": math.fsum(hits) / count,
    }


def _write(
    folder: Path, task: Task, found: Mapping[str, float], result: TrainResult
) -> None:
    """Write the result, then drop the checkpoints it replaces."""
    record: dict[str, Any] = {
        "task": task.to_mapping(),
        "measures": dict(found),
        "losses": result.losses,
        "gradient_norms": result.gradient_norms,
        "parts": dict(result.parts),
    }
    write_record(folder / RESULT, record)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write JSON in one move: a file of that name is complete."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(record))
    draft.rename(path)


LEARNT = "-learnt"


NORMALISER_ARMS = (*NORMALISERS, *(f"{name}{LEARNT}" for name in LEARNABLE))
"""Every name; ``sink-learnt`` has one sink per head that training moves."""


def set_normaliser(model: nn.Module, name: str) -> None:
    """Let every attention of the model weigh with the named normaliser.

    >>> from equipoise_lab.models import GPT, GPTConfig
    >>> model = GPT(GPTConfig(depth=1))
    >>> set_normaliser(model, "sink-learnt"); model.blocks[0].attention.normaliser
    NormaliserModule(sink, heads=4)
    """
    learn = name.endswith(LEARNT)
    NormaliserSwap(to=name.removesuffix(LEARNT), learn=learn).apply(model)


def normaliser_of(attention: nn.Module) -> Normaliser:
    """Return what an attention module of the lab weighs with."""
    module = getattr(attention, ATTRIBUTE)
    return module.normaliser if isinstance(module, NormaliserModule) else Softmax()


WEIGHTS = "model.safetensors"


def keep(trained: TrainedModel) -> dict[str, float]:
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
        folder: ``lab-runs/selection/softmax/seed-42-…``, or a checkpoint in it,
            ``checkpoints/step-00000100``.
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
