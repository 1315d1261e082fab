"""Runs somebody's unmodified script and watches whatever it trains.

A model announces itself by its optimiser: when ``optimizer.step()`` is first called,
the parameters it moves say which module owns them. So nothing is watched that is not
trained, and the script need not know that it is watched. The first step has passed by
then; the run begins with the second.
"""

import gc
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from equipoise.errors import InputError
from equipoise.watching import Watch, watch


def launched(script: Path, arguments: Sequence[str], **options: Any) -> list[Path]:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, watched; return the runs.

    Raises:
        InputError: If the script is not there.
    """
    if not script.is_file():
        raise InputError(f"{script}: no such script; give the path of a Python file")
    with _arguments(script, arguments), _watching(options) as handles, _as_alone():
        runpy.run_path(str(script), run_name="__main__")
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
def _watching(options: dict[str, Any]) -> Iterator[list[Watch]]:
    """Watch each optimiser from its first step on; close all handles at the end."""
    handles: list[Watch] = []
    known: set[int] = set()

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in known:
            known.add(id(optimizer))
            model = owner(optimizer)
            if model is not None:
                handles.append(watch(model, optimizer, **options))

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield handles
    finally:
        hook.remove()
        for handle in handles:
            handle.close()


def owner(optimizer: Optimizer) -> nn.Module | None:
    """Return the outermost living module that holds every parameter of an optimiser."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [
        module
        for module in gc.get_objects()
        if isinstance(module, nn.Module)
        and wanted <= {id(p) for p in module.parameters()}
    ]
    inside = {
        id(child)
        for module in found
        for child in module.modules()
        if child is not module
    }
    return next((module for module in found if id(module) not in inside), None)
