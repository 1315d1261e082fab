"""Run a user's unmodified script and watch whatever it trains.

A model is recognised by its optimiser, whose parameters say which module owns them. So
nothing is watched that is not trained. An optimiser waits from its construction to the
first call of a module that holds one of its parameters: by then the script has wrapped
its model as it wants it, and the first forward pass is still to come. Steps are
numbered as the script makes them, from 0.
"""

import gc
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from equipoise.errors import InputError
from equipoise.watching import Watch, watch
from equipoise.watching.options import WatchArguments, read_options


def launched(
    script: Path,
    arguments: Sequence[str],
    *,
    report: Callable[[list[Path]], Any] = lambda runs: None,
    run: Path | None = None,
    name: str | None = None,
    **options: Unpack[WatchArguments],
) -> list[Path]:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, watched; return the runs.

    ``name`` is what the runs are called, by default their model's class.
    ``report`` is called with the runs however the script ends, by an exception too. A
    script that trains several models writes the second to ``NAME-2``, and so on.

    Raises:
        InputError: If the script is not there, or an option makes no sense.
    """
    if not script.is_file():
        raise InputError(f"{script}: no such script; give the path of a Python file")
    read_options(options)  # now, and not in the middle of the training
    launcher = Launcher(run, name, options)
    try:
        with _arguments(script, arguments), launcher.watching(), _as_alone():
            runpy.run_path(str(script), run_name="__main__")
    finally:
        mine = [Path(h.path) for h in launcher.handles if h.first_rank]
        if mine or not launcher.handles:  # of many ranks, the one that writes
            report(mine)
    return [Path(handle.path) for handle in launcher.handles]


@contextmanager
def _arguments(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    old_arguments, old_path = sys.argv[:], sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = old_arguments, old_path


@contextmanager
def _as_alone() -> Iterator[None]:
    """Let a script that fails show its own traceback and exit code, not ours."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as failure:
        sys.excepthook(type(failure), failure, failure.__traceback__)
        raise SystemExit(1) from failure


class Launcher:
    """Watches each optimiser of a script from its model's first call on.

    While an optimiser waits, the class ``nn.Module`` has a ``__call__`` of ours: a
    hook, which torch offers for this, would make compiled models warn. An optimiser
    whose model is never called as a module is watched after its first step.
    """

    def __init__(
        self, run: Path | None, name: str | None, options: WatchArguments
    ) -> None:
        self.handles: list[Watch] = []
        self._run, self._name, self._options = run, name, options
        # Weak: another optimiser may be born where one died, under the same id.
        self._waiting: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
        self._known: WeakSet[Optimizer] = WeakSet()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what is trained in the block; close all handles at its end."""
        made, launcher = Optimizer.__init__, self

        def make(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            launcher.wait_for_call(optimizer)

        Optimizer.__init__ = make  # type: ignore[assignment,method-assign]
        hook = register_optimizer_step_post_hook(self._stepped)
        try:
            yield
        finally:
            hook.remove()
            Optimizer.__init__ = made  # type: ignore[method-assign]
            self._stop_waiting()
            for handle in self.handles:
                handle.close()

    def wait_for_call(self, optimizer: Optimizer) -> None:
        """Watch an optimiser from the first call of its model."""
        launcher = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and torch.is_grad_enabled():
                launcher._called(module)
            return _CALL(module, *args, **kwargs)

        self._waiting[optimizer] = None
        nn.Module.__call__ = call  # type: ignore[method-assign]

    def _stop_waiting(self) -> None:
        self._waiting.clear()
        nn.Module.__call__ = _CALL  # type: ignore[method-assign]

    def _called(self, module: nn.Module) -> None:
        mine = {id(parameter) for parameter in module.parameters()}
        found = [o for o in self._waiting if not mine.isdisjoint(_ids(o))]
        together = [o for o in found if _ids(o) <= mine]
        if len(together) > 1 and sum(map(len, map(_ids, together))) == len(
            set().union(*map(_ids, together))
        ):
            self._known.update(together)
            self._attach(module, together)
        for optimizer in found:
            self._waiting.pop(optimizer, None)
            self._watch(optimizer)
        if not self._waiting:
            self._stop_waiting()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._waiting.pop(optimizer, None)
        handle = self._watch(optimizer)
        if handle is not None:
            handle.continue_at(1)

    def _watch(self, optimizer: Optimizer) -> Watch | None:
        """Watch the optimiser's model, unless that is watched already."""
        if optimizer in self._known:
            return None
        self._known.add(optimizer)
        model = owner(optimizer)
        return None if model is None else self._attach(model, [optimizer])

    def _attach(self, model: nn.Module, optimizers: list[Optimizer]) -> Watch | None:
        """Watch a model that is not watched yet, and all optimisers that step it."""
        if any(_same(h, model) for h in self.handles):
            return None
        path = _numbered(self._run, len(self.handles))
        handle = watch(model, optimizers, run=path, name=self._name, **self._options)
        self.handles.append(handle)
        return handle


_CALL = nn.Module.__call__


def _same(handle: Watch, model: nn.Module) -> bool:
    """Return whether it is the model of a handle, or a wrapper of that."""
    theirs = {id(p) for p in handle.anatomy.model.parameters()}
    return theirs == {id(p) for p in model.parameters()}


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _numbered(run: Path | None, before: int) -> Path | None:
    """Return a file of its own for each model of a script."""
    if run is None or not before:
        return run
    return run.with_name(f"{run.stem}-{before + 1}{run.suffix}")


def owner(optimizer: Optimizer) -> nn.Module | None:
    """Return the living module that an optimiser trains.

    That is the outermost one that holds all its parameters and none that another
    optimiser trains; where there is none (two optimisers share one model), the
    innermost one that holds them.
    """
    wanted = _ids(optimizer)
    # By type: isinstance asks an object for its class, and some objects answer with
    # imports and deprecation warnings.
    found = [
        module
        for module in gc.get_objects()
        if issubclass(type(module), nn.Module)
        and wanted <= {id(p) for p in module.parameters()}
    ]
    own = [
        m for m in found if {id(p) for p in m.parameters() if p.requires_grad} <= wanted
    ]
    if not own:
        return min(found, key=lambda module: len(list(module.modules())), default=None)
    inside = {id(c) for module in own for c in module.modules() if c is not module}
    return next((module for module in own if id(module) not in inside), None)
