"""Run a recorded step again: what it takes, and where it first goes wrong.

A step can be repeated where its batch, its random state and the weights it started from
were saved. ``watch(..., hold_batch=True)`` saves all three beside the run when the loss
or the gradient norm turns non-finite.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.anatomy.names import named
from equipoise.anatomy.registry import anatomy_of
from equipoise.errors import InputError, RunFileError
from equipoise.probes.boundary import Boundary
from equipoise.probes.capture import Probe, listening
from equipoise.watching.collector import Collector, Table
from equipoise.watching.forensics import Culprit, kind_of
from equipoise.watching.held import Batch
from equipoise.watching.isolation import Autocast, Circumstances, Randomness


def bundle_path(run: Path, step: int) -> Path:
    """Return where the step of a run is kept.

    >>> bundle_path(Path("runs/a.eqp"), 7).as_posix()
    'runs/a.eqp.step-7.pt'
    """
    return run.with_name(f"{run.name}.step-{step}.pt")


def bundles(run: Path) -> dict[int, Path]:
    """Return the steps of a run that can be repeated."""
    found = run.parent.glob(f"{run.name}.step-*.pt")
    return {int(p.name.rsplit("-", 1)[1].removesuffix(".pt")): p for p in sorted(found)}


def save(path: Path, batch: Batch, model: nn.Module) -> None:
    """Keep a step: its batch, its circumstances and the weights before the update."""
    randomness = batch.circumstances.randomness
    numpy = randomness.numpy
    torch.save(
        {
            "args": batch.args,
            "kwargs": batch.kwargs,
            "weights": model.state_dict(),
            "training": model.training,
            "host": randomness.host,
            "cuda": randomness.cuda,
            "python": randomness.python,
            "numpy": None
            if numpy is None
            else [numpy[0], numpy[1].tolist(), *numpy[2:]],
            "autocast": batch.circumstances.autocast.dtypes,
        },
        path,
    )


def loaded(path: Path, model: nn.Module) -> Batch:
    """Return the batch of a kept step, and put its weights into the model.

    Raises:
        RunFileError: If there is no such file.
        InputError: If the weights are not this model's, or the batch holds objects
            that cannot be loaded safely.
    """
    if not path.is_file():
        raise RunFileError(f"{path}: no such step; {NEEDED}")
    try:
        kept = torch.load(path, weights_only=True)
        model.load_state_dict(kept["weights"])
    except (RuntimeError, KeyError) as error:
        raise InputError(f"{path}: does not fit this model ({error})") from error
    except (pickle.UnpicklingError, EOFError, ValueError, OSError) as error:
        raise InputError(f"{path}: cannot be loaded safely ({error})") from error
    model.train(kept["training"])
    randomness = Randomness(kept["host"], kept["cuda"], kept["python"], kept["numpy"])
    now = Circumstances(randomness, Autocast(kept["autocast"]))
    return Batch(kept["args"], kept["kwargs"], now)


NEEDED = (
    "a step can be repeated where batch, random state and weights were saved: watch "
    "with hold_batch=True, which saves them when a loss turns non-finite"
)


def first_bad_module(model: nn.Module, batch: Batch) -> Culprit | None:
    """Return the first module, in the order they finish, whose output is non-finite."""
    found: list[Culprit] = []

    def look(site: str, output: Any) -> None:
        for tensor in _tensors(output) if not found else ():
            if kind := kind_of(tensor):
                what = f"the output of {site or 'the model'}"
                found.append(
                    Culprit(direction="forward", site=site, what=what, kind=kind)
                )
                return

    # After the module's own hooks: one of them may be the culprit.
    handles = [
        module.register_forward_hook(lambda m, args, out, site=site: look(site, out))
        for site, module in named(model)
    ]
    try:
        batch.replay(model)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def measured(model: nn.Module, batch: Batch, probes: list[Probe]) -> Table:
    """Return what the probes say to one step, repeated."""
    emit, boundary = Collector(), Boundary(strict=True)
    with listening(probes, anatomy_of(model), emit, boundary=boundary):
        batch.replay(model)
    return emit.taken()


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for part in output for tensor in _tensors(part)]
    return []
