"""Make one run: build, train, judge, and leave a result behind."""

import json
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from equipoise.lab.data import Batches, Opened, open_data
from equipoise.lab.models import GPT, GPTConfig, ViT
from equipoise.lab.results.measures import curve_measures, measures
from equipoise.lab.running.experiment import Arm, Task
from equipoise.lab.studies.judges import Trained, judged
from equipoise.lab.studies.selection.normaliser_arms import seat
from equipoise.lab.training import distributed as launch
from equipoise.lab.training.options import TrainResult
from equipoise.lab.training.trainer import Listener, Trainer

RESULT = "result.json"
VALIDATION_BATCHES = 8


def execute(
    task: Task, root: Path, listener: Listener | None = None
) -> dict[str, float]:
    """Return the measures of a run; one that is finished is read, not repeated."""
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
    found = _judged(result, trainer.model, data.validation)
    for name in arm.judges:
        held = data.validation or data.train
        trained = Trained(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch=held.take(),
            seen=data.train,
            folder=folder,
        )
        found |= judged(name, trained)
    found["cpu_seconds"] = time.process_time() - start
    _leave(folder, task, found, result)
    return outcome(folder)


def data_of(task: Task) -> Opened:
    """Return the batches a run is trained on and judged by."""
    arm = task.arm
    context = arm.model.context if isinstance(arm.model, GPTConfig) else 0
    return open_data(arm.data, batch=arm.train.batch, seed=task.seed, context=context)


def build(arm: Arm, seed: int) -> GPT | ViT:
    """Return the arm's model with the seed's weights."""
    torch.manual_seed(seed)
    model = GPT(arm.model) if isinstance(arm.model, GPTConfig) else ViT(arm.model)
    if arm.normaliser:
        seat(model, arm.normaliser)
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


def _judged(
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
        x, y = (t.to(launch.device()) for t in batches.take())
        logits = model(x).flatten(0, -2)
        losses.append(F.cross_entropy(logits.float(), y.flatten()).item())
        hits.append((logits.argmax(-1) == y.flatten()).double().mean().item())
    model.train()
    return {
        "validation": math.fsum(losses) / count,
        "accuracy": math.fsum(hits) / count,
    }


def _leave(
    folder: Path, task: Task, found: Mapping[str, float], result: TrainResult
) -> None:
    """Write the result in one move, then drop the checkpoints it replaces."""
    record: dict[str, Any] = {
        "task": task.to_mapping(),
        "measures": dict(found),
        "losses": result.losses,
        "gradient_norms": result.gradient_norms,
        "parts": dict(result.parts),
    }
    draft = folder / f".{RESULT}"
    draft.write_text(json.dumps(record))
    draft.rename(folder / RESULT)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
