"""A callback and a logger for Lightning.

Trainer(callbacks=[EquipoiseCallback(every=10)])
Trainer(logger=EquipoiseLogger(every=10))  # what the module logs is recorded too
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from equipoise.integrations.logged import configuration, numbers
from equipoise.watching import Watch, watch
from equipoise.watching.options import CallbackArguments, check_callback


class EquipoiseCallback(Callback):  # type: ignore[misc]
    """Watches the module a Lightning Trainer fits, with any option of ``watch``.

    Lightning calls ``training_step``, not the module: attention is measured from the
    first part that the step calls to its backward pass. With several optimisers a
    step ends when all have stepped. Steps have Lightning's numbers, also when a fit
    is resumed.
    """

    def __init__(self, **options: Unpack[CallbackArguments]) -> None:
        self._options = check_callback(options)
        self._restored: dict[str, Any] | None = None
        self.handle: Watch | None = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.handle = watch(module, trainer.optimizers, **self._options)
        # Lightning counts the steps of all optimisers together.
        step = trainer.global_step // len(trainer.optimizers)
        if step:
            self.handle.continue_at(step, self._restored)

    def on_train_batch_end(
        self, trainer: Any, module: Any, *batch: Any, **given: Any
    ) -> None:
        if self.handle is not None and self.handle.should_stop:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
        if self.handle is not None and metrics and not trainer.sanity_checking:
            self.handle.step(**metrics)

    def state_dict(self) -> dict[str, Any]:
        return self.handle.state_dict() if self.handle is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state or None

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._close()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self.handle is not None:
            self.handle.close()
            self.handle = None


class EquipoiseLogger(Logger):  # type: ignore[misc]
    """A logger that watches: its readings, and the metrics that the module logs.

    It brings a callback of ours, unless the Trainer has one already, and gives it the
    hyperparameters. A metric whose name we record ourselves becomes ``logged.NAME``.
    """

    def __init__(self, **options: Unpack[CallbackArguments]) -> None:
        super().__init__()
        self._info = options["info"] = dict(options.get("info") or {})
        self._callback = EquipoiseCallback(**options)

    @property
    def name(self) -> str:
        return "equipoise"

    @property
    def version(self) -> str | None:
        """The name of the run file; None before the training."""
        handle = self._callback.handle
        return None if handle is None else Path(handle.path).stem

    @property
    def experiment(self) -> Watch | None:
        """The handle; None before and after the training."""
        return self._callback.handle

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Bring the callback: Lightning calls this on every rank before it trains."""
        callbacks = model.trainer.callbacks
        for callback in callbacks:
            if isinstance(callback, EquipoiseCallback):
                self._callback = callback
                return
        callbacks.append(self._callback)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._info.update(configuration(params))

    def log_metrics(
        self, metrics: Mapping[str, float], step: int | None = None
    ) -> None:
        found = numbers(metrics)
        if self._callback.handle is not None and found:
            self._callback.handle.step(**found)
