"""Repeat a saved step: what it takes, where it is saved, and what probes read in it.

A step can be repeated where its batch, its random state and the weights it started from
were saved. ``watch(..., hold_batch=True)`` saves all three beside the run when the loss
or the gradient norm turns non-finite.
"""

import glob
import pickle
from pathlib import Path

import torch
from torch import nn

from equipoise.anatomy.discovery import anatomy_of
from equipoise.errors import InputError, RunFileError
from equipoise.probes.capture import Boundary, Capture, Collector, Table
from equipoise.probes.protocols import Probe
from equipoise.watching.batch import Autocast, Batch, CallState, RandomState


def bundle_path(run: Path, step: int) -> Path:
    """Return where the step of a run is saved.

    >>> bundle_path(Path("runs/a.eqp"), 7).as_posix()
    'runs/a.eqp.step-7.pt'
    """
    return run.with_name(f"{run.name}.step-{step}.pt")


def bundles(run: Path) -> dict[int, Path]:
    """Return the steps of a run that can be repeated."""
    # Escaped: a run may be called lr[1e-3].eqp.
    found = run.parent.glob(f"{glob.escape(run.name)}.step-*.pt")
    numbers = ((p.name.rsplit("-", 1)[1].removesuffix(".pt"), p) for p in sorted(found))
    return {int(number): path for number, path in numbers if number.isdecimal()}


def save_step(path: Path, batch: Batch, model: nn.Module) -> None:
    """Keep a step: its batch, the state it ran in and the weights before the update."""
    random_state = batch.call_state.random_state
    numpy = random_state.numpy
    torch.save(
        {
            "args": batch.args,
            "kwargs": batch.kwargs,
            "weights": model.state_dict(),
            "training": model.training,
            "host": random_state.host,
            "cuda": random_state.cuda,
            "python": random_state.python,
            "numpy": None
            if numpy is None
            else [numpy[0], numpy[1].tolist(), *numpy[2:]],
            "autocast": batch.call_state.autocast.dtypes,
        },
        path,
    )


def load_step(path: Path, model: nn.Module) -> Batch:
    """Return the batch of a saved step, and put its weights into the model.

    Raises:
        RunFileError: If there is no such file.
        InputError: If the weights are not this model's, or the batch holds objects
            that cannot be loaded safely.
    """
    if not path.is_file():
        raise RunFileError(f"{path}: no such step; {NEEDED}")
    try:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["weights"])
        model.train(saved["training"])
        random_state = RandomState(
            saved["host"], saved["cuda"], saved["python"], saved["numpy"]
        )
        now = CallState(random_state, Autocast(saved["autocast"]))
        return Batch(saved["args"], saved["kwargs"], now)
    except (pickle.UnpicklingError, EOFError, ValueError, OSError) as error:
        raise InputError(f"{path}: cannot be loaded safely ({error})") from error
    except (RuntimeError, LookupError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: does not fit this model ({reason})") from error


NEEDED = (
    "a step can be repeated where batch, random state and weights were saved: watch "
    "with hold_batch=True, which saves them when a loss turns non-finite"
)


def measure(model: nn.Module, batch: Batch, probes: list[Probe]) -> Table:
    """Return what the probes read in one step, repeated."""
    emit, boundary = Collector(), Boundary(strict=True)
    with Capture(probes, anatomy_of(model), emit, boundary=boundary).open():
        batch.replay(model)
    return emit.pop()
