"""A tracker for Accelerate: ``Accelerator(log_with="equipoise")``.

A tracker is given numbers, never the model. So from ``init_trackers`` on every
optimiser of the process is watched, as ``equipoise run`` does it: from its model's
first call, when Accelerate has wrapped the model.
"""

import gc
from contextlib import ExitStack
from typing import Any, Unpack

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.tracking import GeneralTracker
from torch.optim import Optimizer

from equipoise.integrations.launcher import Launcher
from equipoise.integrations.logged import configuration, numbers
from equipoise.watching import Watch
from equipoise.watching.options import CallbackArguments, check_callback


class EquipoiseTracker(GeneralTracker):  # type: ignore[misc]
    """Watches what an Accelerator trains, with any option of ``equipoise.watch``.

    Options: ``init_kwargs={"equipoise": {"every": 5}}``, or
    ``log_with=EquipoiseTracker("name", every=5)``. What the script logs is recorded
    beside our readings; a name that we record ourselves becomes ``logged.NAME``.
    """

    name = "equipoise"
    requires_logging_directory = False
    main_process_only = False  # a group is watched on all ranks

    def __init__(
        self, run_name: str | None = None, **options: Unpack[CallbackArguments]
    ) -> None:
        super().__init__()
        given: dict[str, Any] = {**check_callback(options)}
        run, name = given.pop("run", None), given.pop("name", run_name)
        self._info: dict[str, Any] = given.setdefault("info", {})
        self._launcher = Launcher(run, name, given)  # type: ignore[arg-type]
        self._watching = ExitStack()

    @property
    def tracker(self) -> Watch | None:
        """The handle of the model that is watched; None before its first call."""
        return next(iter(self._launcher.handles), None)

    def start(self) -> None:
        self._watching.enter_context(self._launcher.watching())
        for optimizer in _optimizers():
            self._launcher.wait_for_call(optimizer)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._info.update(configuration(values))

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        found = numbers(values)
        if self.tracker is not None and found:
            self.tracker.step(**found)

    def finish(self) -> None:
        self._watching.close()


def _optimizers() -> list[Optimizer]:
    """Return the optimisers that were made already, without Accelerate's wrappers."""
    # By type: isinstance asks an object for its class, and some answer with imports
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), Optimizer)
        and not issubclass(type(found), AcceleratedOptimizer)
    ]
