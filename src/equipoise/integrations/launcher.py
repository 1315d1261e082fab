"""Run a user's unmodified script and watch whatever it trains.

A model is recognised by its optimiser: when ``optimizer.step()`` is first called,
the parameters it moves say which module owns them. So nothing is watched that is not
trained, and the script need not know that it is watched. The first step has passed by
then; the run begins with the second.
"""

import gc
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from equipoise.errors import InputError
from equipoise.watching import Watch, watch
from equipoise.watching.options import read_options


def launched(
    script: Path,
    arguments: Sequence[str],
    *,
    report: Callable[[list[Path]], Any] = lambda runs: None,
    run: Path | None = None,
    name: str | None = None,
    **options: Any,
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
    about = {"name": name, **options}
    handles: list[Watch] = []
    try:
        with _arguments(script, arguments), _watching(handles, run, about):
            with _as_alone():
                runpy.run_path(str(script), run_name="__main__")
    finally:
        mine = [Path(handle.path) for handle in handles if handle.first_rank]
        if mine or not handles:  # of many ranks, the one that writes also reports
            report(mine)
    return [Path(handle.path) for handle in handles]


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


@contextmanager
def _watching(
    handles: list[Watch], run: Path | None, options: dict[str, Any]
) -> Iterator[None]:
    """Watch each optimiser from its first step on; close all handles at the end."""
    # Weak: another optimiser may be born where one died, under the same id.
    known: WeakSet[Optimizer] = WeakSet()

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in known:
            return
        known.add(optimizer)
        model = owner(optimizer)
        # Two optimisers may share a model: the first to step counts its steps.
        if model is None or any(h.anatomy.model is model for h in handles):
            return
        path = _numbered(run, len(handles))
        handles.append(watch(model, optimizer, run=path, **options))

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        hook.remove()
        for handle in handles:
            handle.close()


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
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
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
