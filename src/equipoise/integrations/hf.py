"""A callback for the Hugging Face ``Trainer``, and for those of TRL.

TrainingArguments(..., report_to="equipoise")
Trainer(..., callbacks=[EquipoiseCallback(every=10)])
"""

import gc
import json
from pathlib import Path
from typing import Any, Self, Unpack

from transformers import Trainer, TrainerCallback

from equipoise.watching import Watch, watch
from equipoise.watching.options import CallbackArguments, check_callback

STATE = "equipoise.json"
"""Beside the Trainer's own state in every checkpoint: which step is sampled next."""


class EquipoiseCallback(TrainerCallback):  # type: ignore[misc]
    """Watches the model a Trainer trains, with any option of ``equipoise.watch``.

    The Trainer hides NaN losses by default (``logging_nan_inf_filter``); the loss
    recorded here is the one that was differentiated. Steps have the Trainer's numbers,
    counted from 0: what it calls global step 4 after the step is step 3 here. It is
    closed when training ends; after a training that raised, call ``close``.
    """

    def __init__(self, **options: Unpack[CallbackArguments]) -> None:
        self._options = check_callback(options)
        self._reports = False
        self.handle: Watch | None = None

    @classmethod
    def reporting(cls) -> Self:
        """Return the callback of ``report_to="equipoise"``.

        Its run has the Trainer's ``run_name``. Where the Trainer was also given a
        callback of ours, with options, that one watches and this one does not.
        """
        callback = cls()
        callback._reports = True
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        trainer = self._trainer()
        if self._reports and trainer is not None and _is_given_one(trainer):
            return
        # Callbacks are given the model inside what the Trainer calls. Where
        # torch.compile wraps the model, a hook on the model itself never runs.
        model = given["model"] if trainer is None else trainer.model_wrapped
        if self._reports:
            self._options.setdefault("name", _run_name(args))
        self.handle = watch(model, given["optimizer"], **self._options)
        if state.global_step:
            self.handle.continue_at(state.global_step, _saved_state(args, state))

    def _trainer(self) -> Any:
        """Return the Trainer that holds this callback."""
        # By type: isinstance asks an object for its class, and some answer with imports
        for trainer in (t for t in gc.get_objects() if issubclass(type(t), Trainer)):
            if any(callback is self for callback in trainer.callback_handler.callbacks):
                return trainer
        return None

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.handle is not None and self.handle.should_stop:
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        metrics = given.get("metrics") or {}
        numbers = {
            k: float(v) for k, v in metrics.items() if isinstance(v, int | float)
        }
        if self.handle is not None and numbers:
            self.handle.step(**numbers)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.handle is not None and state.is_world_process_zero:
            path = _state_file(args, state)
            path.write_text(json.dumps(self.handle.state_dict()))

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching; a training that raised never reaches ``on_train_end``."""
        if self.handle is not None:
            self.handle.close()
            self.handle = None


def _is_given_one(trainer: Any) -> bool:
    """Say whether a Trainer holds a callback of ours that was made by its user."""
    return any(
        isinstance(callback, EquipoiseCallback) and not callback._reports
        for callback in trainer.callback_handler.callbacks
    )


def _run_name(args: Any) -> str | None:
    """Return the name that was given; older versions put the folder in its place."""
    name = getattr(args, "run_name", None)
    return None if name == args.output_dir else name


def _state_file(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE


def _saved_state(args: Any, state: Any) -> dict[str, Any] | None:
    """Return our state in the checkpoint that was resumed from, if it is known."""
    given = getattr(args, "resume_from_checkpoint", None)
    moved = Path(given) / STATE if isinstance(given, str) else None
    for path in (moved, _state_file(args, state)):
        if path is not None and path.is_file():
            saved: dict[str, Any] = json.loads(path.read_text())
            return saved
    return None
