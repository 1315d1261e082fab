"""A callback for the Hugging Face ``Trainer``.

Trainer(..., callbacks=[EquipoiseCallback(every=10)])
"""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from equipoise.watching import Watch, watch

STATE = "equipoise.json"
"""Beside the Trainer's own state in every checkpoint: which step is sampled next."""


class EquipoiseCallback(TrainerCallback):  # type: ignore[misc]
    """Watches the model a Trainer trains, with any option of ``equipoise.watch``.

    The Trainer hides NaN losses by default (``logging_nan_inf_filter``); the loss
    recorded here is the one that was differentiated.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.handle: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.handle = watch(given["model"], given["optimizer"], **self._options)
        saved = _state_file(args, state)
        if state.global_step and saved.is_file():
            self.handle.load_state_dict(json.loads(saved.read_text()))

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
