"""A callback for the Hugging Face ``Trainer``.

Trainer(..., callbacks=[EquipoiseCallback(every=10)])
"""

import gc
import json
from pathlib import Path
from typing import Any, Unpack

from torch import nn
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
        self.handle: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model = self._called_model(given["model"])
        self.handle = watch(model, given["optimizer"], **self._options)
        if state.global_step:
            self.handle.continue_at(state.global_step, _saved_state(args, state))

    def _called_model(self, model: nn.Module) -> nn.Module:
        """Return what the Trainer calls: callbacks are given the model inside that.

        Where ``torch.compile`` wraps the model, a hook on the model itself never runs.
        """
        # By type: isinstance asks an object for its class, and some answer with imports
        for trainer in (t for t in gc.get_objects() if issubclass(type(t), Trainer)):
            if any(callback is self for callback in trainer.callback_handler.callbacks):
                wrapped: nn.Module = trainer.model_wrapped
                return wrapped
        return model

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
