"""Make one run of the benchmark: train it under watch, evaluate it, write it down."""

import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from equipoise_lab.data import DataOptions, open_data
from equipoise_lab.models import GPT
from equipoise_lab.running.execution import evaluate, write_record
from equipoise_lab.storms.families import TRAIN, FaultChange, change_of, shape_of
from equipoise_lab.storms.plan import Storm
from equipoise_lab.training.options import TrainOptions
from equipoise_lab.training.trainer import Listener, Trainer

VALIDATION = 16
"""Fixed batches on which every run is compared."""


def make(storm: Storm, root: Path, listener: Listener | None = None) -> None:
    """Train the run and leave ``run.eqp`` and its result under ``root``.

    The run file says nothing of the fault, so that no forecaster can read it there.
    """
    folder, start = root / storm.folder, time.process_time()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.eqp").unlink(missing_ok=True)  # of a run that was killed
    change = change_of(storm)
    config = replace(shape_of(storm), **change.model)
    options = _options(storm, change)
    data = open_data(
        DataOptions(), batch=options.batch, seed=storm.seed, context=config.context
    )
    torch.manual_seed(storm.seed)
    model = GPT(config)
    if change.pretrained:
        early = replace(TRAIN, steps=change.pretrained, seed=storm.seed, watch=False)
        Trainer(model, data.train, early).run()
    change.prepare(model)
    trainer = Trainer(
        model,
        change.batches(data.train),
        options,
        folder=folder,
        listener=listener,
        before_step=change.before_step,
    )
    result = trainer.run()
    fixed = open_data(DataOptions(), batch=32, seed=0, context=config.context)
    assert fixed.validation is not None
    record = {
        "storm": asdict(storm),
        "injected": change.injected,
        "layer": change.layer,
        "validation": _finite(evaluate(model, fixed.validation, count=VALIDATION)),
        "losses": result.losses,
        "gradient_norms": result.gradient_norms,
        "cpu_seconds": time.process_time() - start,
    }
    write_record(folder / storm.result.name, record)


def _options(storm: Storm, change: FaultChange) -> TrainOptions:
    warmup = min(TRAIN.warmup, storm.steps)
    ordinary = {"steps": storm.steps, "seed": storm.seed, "warmup": warmup}
    return replace(TRAIN, **{**ordinary, **change.train})


def _finite(found: dict[str, float]) -> float:
    """Return the loss, infinite where it is not a number: worse than any other."""
    loss = found["validation"]
    return loss if math.isfinite(loss) else math.inf
