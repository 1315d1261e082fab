"""Weights & Biases: the run that is open, or a new one that stays on this machine."""

import os
from pathlib import Path
from typing import Any

import wandb

from equipoise.sinks import Values

STEP = "equipoise/step"


class WandbRun:
    """Logs under ``equipoise/``, against a step of its own.

    W&B drops what is logged at an earlier step than it has seen; a training script
    that logs by itself would make us lose readings, or we its.
    """

    def __init__(self, run: Any, *, ours: bool) -> None:
        self._run = run
        self._ours = ours
        run.define_metric(STEP)
        run.define_metric("equipoise/*", step_metric=STEP)

    def log(self, values: Values, step: int) -> None:
        named = {f"equipoise/{key}": value for key, value in values.items()}
        self._run.log({**named, STEP: step})

    def close(self) -> None:
        if self._ours:
            self._run.finish()


def opened(target: Path) -> WandbRun:
    """Join the open run, or start one: offline unless ``WANDB_MODE`` says otherwise."""
    if wandb.run is not None:
        return WandbRun(wandb.run, ours=False)
    target.mkdir(parents=True, exist_ok=True)
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    run = wandb.init(project="equipoise", name=target.name, dir=target, mode=mode)
    return WandbRun(run, ours=True)
