"""Weights & Biases: the run that is open, or a new one that stays on this machine."""

import atexit
import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import wandb

from equipoise.sinks import Values

STEP = "equipoise/step"
MOST_WAITING = 1000


class OwnRun:
    """A run of ours: logs under ``equipoise/``, against a step of its own."""

    def __init__(self, run: Any) -> None:
        self._run = run
        _define(run)

    def log(self, values: Values, step: int) -> None:
        self._run.log(_named(values, step))

    def close(self) -> None:
        self._run.finish()


class UsersRun:
    """The run that the user's script logs to: nothing of it may be lost to us.

    Every row that is committed counts W&B's own step up, and W&B ignores what is logged
    at an earlier step. So we never commit: numbers join the row that the script will
    commit next, one step of ours to one row of theirs. A script that logs more rarely
    than we do gets the latest in the end; the run file has all of them. Only in a run
    to which the script logs nothing do we write rows of our own, as the script ends.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._waiting: deque[dict[str, float]] = deque(maxlen=MOST_WAITING)
        self._first = self._row = run.step
        self._joined = False
        _define(run)

    def log(self, values: Values, step: int) -> None:
        self._waiting.append(_named(values, step))
        if self._run.step > self._row or not self._joined:
            self._join(self._waiting.popleft())

    def _join(self, values: dict[str, float]) -> None:
        self._run.log(values, commit=False)
        self._row, self._joined = self._run.step, True

    def close(self) -> None:
        if self._run.step > self._first and self._waiting:
            self._join(self._waiting.pop())
            self._waiting.clear()
        elif self._waiting:
            # It may still log at its first step. When it has ended it cannot.
            atexit.register(self.write_rows)

    def write_rows(self) -> None:
        """Write what waits as rows of our own: for when the script logs no more."""
        with suppress(wandb.Error):  # its run may be finished by then
            while self._waiting:
                self._run.log({}, commit=True)
                self._run.log(self._waiting.popleft(), commit=False)


def _define(run: Any) -> None:
    run.define_metric(STEP)
    run.define_metric("equipoise/*", step_metric=STEP)


def _named(values: Values, step: int) -> dict[str, float]:
    return {**{f"equipoise/{key}": value for key, value in values.items()}, STEP: step}


def opened(target: Path) -> OwnRun | UsersRun:
    """Join the open run, or start one: offline unless ``WANDB_MODE`` says otherwise."""
    if wandb.run is not None:
        return UsersRun(wandb.run)
    target.mkdir(parents=True, exist_ok=True)
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    run = wandb.init(project="equipoise", name=target.name, dir=target, mode=mode)
    return OwnRun(run)
