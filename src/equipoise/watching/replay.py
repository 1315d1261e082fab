"""Run a recorded step again: what it takes, and where it first goes wrong.

A step can be repeated where its batch, its random state and the weights it started from
were saved. ``watch(..., hold_batch=True)`` saves all three beside the run when the loss
or the gradient norm turns non-finite.

Where the first non-finite tensor of a step is, found without a hook in place.

A non-finite loss is seen before its backward pass. The autograd graph then still holds
what the forward pass saved: walking it in forward order finds the first bad tensor,
of this very batch, before any weight has moved. A non-finite gradient norm is seen
before it clips: the bad gradient nearest the loss came first. A weight that is already
bad when the loss is computed was broken by the update before.
"""

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.sharding import local_part
from equipoise.anatomy.sites import named
from equipoise.errors import InputError, RunFileError
from equipoise.probes.capture import Boundary, Probe, listening
from equipoise.watching.batch import Autocast, Batch, Circumstances, Randomness
from equipoise.watching.step_readings import Collector, Table

Direction = Literal["forward", "backward", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The first non-finite tensor, as far as it can be told."""

    direction: Direction
    site: str
    what: str
    """Which tensor, in words."""
    kind: Literal["NaN", "Inf"]

    @property
    def sentence(self) -> str:
        return f"{self.kind} first in {self.what} ({self.direction})"


def host_value(scalar: Tensor) -> float | None:
    """Return a scalar that is on the host already; None if reading it would wait."""
    if scalar.device.type != "cpu":
        return None
    # Through NumPy: the patient's operators are not called, in a profile or otherwise.
    return float(local_part(scalar.detach()).double().numpy().reshape(()))


def is_bad(scalar: Tensor) -> bool:
    """Say whether a scalar on the host is NaN or Inf; False if it is elsewhere."""
    value = host_value(scalar)
    return value is not None and not math.isfinite(value)


def broken_weight(model: nn.Module) -> Culprit | None:
    """Return the first weight that is non-finite before the pass has begun."""
    for site, parameter_name, parameter in _parameters(model):
        if kind := kind_of(parameter):
            what = f"the weight {site}.{parameter_name}".replace("weight .", "weight ")
            return Culprit(direction="update", site=site, what=what, kind=kind)
    return None


def broken_gradient(model: nn.Module) -> Culprit | None:
    """Return the bad gradient nearest the loss: backward reaches it first."""
    for site, parameter_name, parameter in reversed(list(_parameters(model))):
        if parameter.grad is not None and (kind := kind_of(parameter.grad)):
            what = f"the gradient of {site}.{parameter_name}".replace("of .", "of ")
            return Culprit(direction="backward", site=site, what=what, kind=kind)
    return None


def broken_activation(model: nn.Module, loss: Tensor) -> Culprit | None:
    """Return the first bad tensor that the forward pass saved for its backward.

    The site is the module whose parameters the operation used; an operation without
    parameters belongs to the last such module before it, named as what it follows.
    """
    owners: dict[int, list[str]] = {}
    for name, _, parameter in _parameters(model):
        owners.setdefault(id(parameter), []).append(name)
    before = ""
    for node in _in_forward_order(loss.grad_fn):
        users = _owners(node, owners)
        # A tied weight is first the embedding's, later the head's.
        site = users[-1 if before else 0] if users else None
        for name, saved in _saved(node):
            if id(saved) not in owners and (kind := kind_of(saved)):
                return _activation(
                    node, name, before if site is None else site, before, kind
                )
        before = before if site is None else site
    kind = kind_of(loss)
    what = f"the loss itself, after {before}"
    return kind and Culprit(direction="forward", site=before, what=what, kind=kind)


def _activation(
    node: Any, name: str, site: str, before: str, kind: Literal["NaN", "Inf"]
) -> Culprit:
    operation = node.name().removesuffix("0").removesuffix("Backward")
    result = "result" in name or "output" in name
    role = "the result of" if result else "the input of"
    follows = f", after {before}" if before and before != site and not result else ""
    what = f"{role} {operation} at {site or 'the model'}{follows}"
    return Culprit(direction="forward", site=site, what=what, kind=kind)


def _parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield (module, name, parameter) in the order of the modules."""
    for site, module in named(model):
        for name, parameter in module.named_parameters(recurse=False):
            yield site, name, parameter


def kind_of(x: Any) -> Literal["NaN", "Inf"] | None:
    """Return what is wrong with a tensor's values, if anything."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return None
    x = local_part(x.detach())
    if x.untyped_storage().nbytes() == 0:  # FSDP took its memory back: nothing to see
        return None
    if bool(torch.isfinite(x).all()):
        return None
    return "NaN" if bool(torch.isnan(x).any()) else "Inf"


def _in_forward_order(root: Any) -> list[Any]:
    """Return the nodes of a graph as they were made; leaves come with their users."""
    seen: dict[Any, None] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node.name().endswith("AccumulateGrad"):
            continue
        seen[node] = None
        waiting.extend(following for following, _ in node.next_functions)
    return sorted(seen, key=lambda node: node._sequence_nr())


def _owners(node: Any, owners: dict[int, list[str]]) -> list[str]:
    """Return the modules whose parameter an operation uses, directly or transposed."""
    for following, _ in node.next_functions:
        hops = 0
        while following is not None and hops < 3:
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                return owners.get(id(leaf), [])
            edges = following.next_functions
            following, hops = (edges[0][0], hops + 1) if len(edges) == 1 else (None, 3)
    return []


def _saved(node: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors a node saved, where looking does not recompute them."""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        raw = getattr(node, name)
        parts = raw if isinstance(raw, list | tuple) else [raw]
        # Activation checkpointing would run the forward again to answer.
        if any(part is None or part.unpack_hook is not None for part in parts):
            continue
        # A function written in Python names them without the underscore.
        known = "saved_tensors" if name == "_raw_saved_tensors" else name[4:]
        saved = getattr(node, known)
        for tensor in saved if isinstance(saved, list | tuple) else [saved]:
            yield name, tensor


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
