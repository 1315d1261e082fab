"""Facts of replicas: what each rank holds of weights that all should hold alike.

DDP says that they should. Without it gradients that a loop averages by hand say so, and
beside the shards of one mesh so do weights that were alike before.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.sharding import is_dtensor, is_sharded
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.loop_events import AnyUpdate, LoopEvent
from equipoise.probes.protocols import Guarded
from equipoise.watching.facts.loop_record import LoopRecord
from equipoise.watching.facts.weights import parameters_of

MOST, PLACES = 64, 16


@dataclass(slots=True)
class ReplicaFacts:
    """Fingerprints of the weights and gradients of which every rank holds a whole."""

    record: LoopRecord
    name: str = "replicas"
    _called: dict[str, int] = field(default_factory=dict)
    _gradients: Tensor | None = None

    def begin_step(self, step: int) -> None:
        self._called, self._gradients = {"wrapper": 0, "model": 0}, None

    def attach(
        self, anatomy: Anatomy, emit: Any, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        if (wrapper := wrapper_of(anatomy.model)) is not None:
            for key, module in (("wrapper", wrapper), ("model", wrapper.module)):
                yield hooks.after(module, guarded(self._counts(key)))

    def _counts(self, key: str) -> Any:
        def called(*_: Any) -> None:
            self._called[key] = self._called.get(key, 0) + 1

        return called

    def on_loop(self, event: LoopEvent) -> None:
        if not (self.record.armed and isinstance(event, AnyUpdate)):
            return
        model = self.record.model
        if model is None or _ranks() < 2:
            return
        own = self.record.own()
        groups = event.optimizer.param_groups
        if any(id(p) in own for group in groups for p in group["params"]):
            grads = [p.grad for _, p in _some(model) if p.grad is not None]
            self._gradients = fingerprint(grads) if grads else None

    def facts(self) -> Mapping[str, Any]:
        model = self.record.model
        some = [] if model is None or _ranks() < 2 else _some(model)
        if model is None or not some:
            return {}
        wrapper = wrapper_of(model)
        found: dict[str, Any] = {
            "wrapper": "" if wrapper is None else type(wrapper).__name__,
            "one_mesh": wrapper is None and _is_split_once(model),
            "names": [name for name, _ in some],
            "weights": fingerprint([p.detach() for _, p in some]),
            "called": dict(self._called),
        }
        if self._gradients is not None:
            found["gradients"] = self._gradients
        return found


def _ranks() -> int:
    dist = torch.distributed
    known = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if known else 1


def _is_split_once(model: nn.Module) -> bool:
    """Return whether all ranks hold parts of the model along one axis, and no other."""
    meshes = [getattr(p, "device_mesh", None) for p in model.parameters()]
    known = [mesh for mesh in meshes if mesh is not None]
    whole = bool(known) and any(map(is_sharded, model.parameters()))
    return whole and all(m.ndim == 1 and m.size() == _ranks() for m in known)


def wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return DDP's wrapper if it spans all ranks, and averages in the usual way."""
    inside: Any = model
    while not isinstance(inside, DistributedDataParallel):
        inside = getattr(inside, "_orig_mod", None)
        if inside is None:
            return None
    world = torch.distributed.get_world_size()
    spans = torch.distributed.get_world_size(inside.process_group) == world
    return inside if spans and world > 1 else None


def _some(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return parameters spread over the model, the same on every rank."""
    every = [
        (name, p)
        for name, p in parameters_of(model)
        if p.requires_grad and not is_dtensor(p) and p.numel()
    ]
    return every[:: max(1, len(every) // MOST)][:MOST]


def fingerprint(tensors: list[Tensor]) -> Tensor:
    """Return one number of each tensor, made of 16 of its entries."""
    return torch.stack([_one(x).to(tensors[0].device) for x in tensors])


def _one(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    some = flat[:: max(1, flat.numel() // PLACES)][:PLACES].float()
    # Different weights for each place: entries that changed places are not equal.
    weights = torch.arange(1, some.numel() + 1, device=x.device, dtype=torch.float32)
    total: Tensor = (some * weights.sqrt()).sum()
    return total
