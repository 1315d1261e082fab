"""Facts of the weights: what is trained, what moves, and what its gradient is made of.

Everything is read at a bounded number of places, in few operations, and travels with
the sample; the largest entry of every weight is read in a few of the samples only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.sharding import is_dtensor, local_part
from equipoise.anatomy.sites import named, unwrapped
from equipoise.probes.loop_events import AnyBackward, AnyUpdate, LoopEvent
from equipoise.probes.protocols import Emit
from equipoise.watching.facts.loop_record import LoopRecord, rates_of

PLACES = 32
"""Numbers of a matrix that are compared before and after an update."""
MATRICES = 48
"""Matrices of which they are: the largest."""
LISTED = 4096
"""Parameters whose largest entries are listed one by one."""
LARGEST_AT = (0, 1, 2, 3, 5, 8)
"""Samples in which the largest entry of every weight is read, and each eighth after."""
Named = tuple[str, nn.Parameter]


@dataclass(slots=True)
class WeightFacts:
    """What is trained of a model, and what its updates do."""

    record: LoopRecord
    name: str = "weights"
    _samples: int = -1
    _marks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Id of a parameter → its gradient as the last update left it."""
    _left: dict[int, list[Tensor]] = field(default_factory=dict)
    """Those not cleared since → whether each backward pass began with numbers in it."""
    _stale: list[tuple[str, Tensor]] = field(default_factory=list)
    _before: dict[int, tuple[list[nn.Parameter], list[Tensor], list[Tensor]]] = field(
        default_factory=dict
    )
    _asked: list[Tensor] = field(default_factory=list)
    _moved: list[Tensor] = field(default_factory=list)
    _numbers: list[int] = field(default_factory=list)
    _rates: list[float] = field(default_factory=list)

    def begin_step(self, step: int) -> None:
        self._samples += 1
        for kept in (self._left, self._before):
            kept.clear()
        for row in (self._stale, self._asked, self._moved, self._numbers, self._rates):
            row.clear()
        model = self.record.model
        marks = {} if model is None else _marks(model)
        # What was there before watching may be a gradient that is still to be used.
        self._marks = marks if any(r.updates for r in self._records()) else {}

    def _records(self) -> list[Any]:
        return list(self.record.optimizers.values())

    def on_loop(self, event: LoopEvent) -> None:
        if not self.record.armed or self.record.model is None:
            return
        if isinstance(event, AnyBackward):
            self._backward()
        elif isinstance(event, AnyUpdate):
            self._update(event.optimizer)

    def _backward(self) -> None:
        """Keep what is left of gradients that an earlier update has used."""
        if not self._marks:
            return
        assert self.record.model is not None
        first, left = self.record.passes == 1, dict[int, list[Tensor]]()
        for parameter in self.record.model.parameters():
            grad, key = parameter.grad, id(parameter)
            if grad is None or key not in self._marks or is_dtensor(grad):
                continue
            same = (id(grad), grad._version) == self._marks[key]
            if (same if first else key in self._left) and grad.layout is torch.strided:
                left[key] = [*self._left.get(key, ()), _places(grad).any()]
        self._left = left
        if not left:
            self._marks = {}

    def _update(self, optimizer: Optimizer) -> None:
        """Copy some numbers of the largest matrices that an optimiser will move."""
        rates = rates_of(optimizer)
        if rates is None or id(optimizer) in self._before:
            return
        own = self.record.own()
        pairs = zip(optimizer.param_groups, rates, strict=True)
        some = [
            (parameter, rate)
            for group, rate in pairs
            for parameter in group["params"]
            if id(parameter) in own and _is_read(parameter)
        ]
        if not some:
            return
        self._rates += [rate for _, rate in some]
        moving = [parameter for parameter, rate in some if rate > 0]
        largest = sorted(moving, key=lambda p: -p.numel())[:MATRICES]
        weights = [_places(p.detach()).clone() for p in largest]
        grads = [_places(p.grad) != 0 for p in largest if p.grad is not None]
        self._before[id(optimizer)] = largest, weights, grads

    def on_update(self, optimizer: Optimizer, emit: Emit) -> None:
        largest, weights, grads = self._before.pop(id(optimizer), ([], [], []))
        for parameter, before, active in zip(largest, weights, grads, strict=True):
            moved = (_places(parameter.detach()) != before) & active
            self._moved.append(moved.any())
            self._asked.append(active.any())
            self._numbers.append(parameter.numel())
        if self._left and self.record.model is not None:
            mine = {id(p) for g in optimizer.param_groups for p in g["params"]}
            for name, parameter in parameters_of(self.record.model):
                if id(parameter) in mine and id(parameter) in self._left:
                    flags = torch.stack(self._left[id(parameter)])
                    self._stale.append((name, flags.all()))

    def facts(self) -> Mapping[str, Any]:
        model = self.record.model
        if model is None:
            return {}
        found = _trained(model)
        if self._asked:
            found["moves"] = {
                "asked": torch.stack(self._asked),
                "moved": torch.stack(self._moved),
                "numbers": list(self._numbers),
                "rate": min(self._rates),
            }
        if self._stale:
            names, flags = zip(*self._stale[:LISTED], strict=True)
            found["left_over"] = {"names": list(names), "left": torch.stack(flags)}
        found["sample"] = self._samples
        found["checked_left_over"] = bool(self._updates_seen() > 1)
        if self._samples in LARGEST_AT or self._samples % 8 == 0:
            found["largest"] = _largest(model, self.record)
        return found

    def _updates_seen(self) -> int:
        return max((record.updates for record in self._records()), default=0)


def parameters_of(model: nn.Module) -> Iterator[Named]:
    """Yield each parameter once, under the name without its wrappers."""
    seen = set[int]()
    for name, module in named(model):
        for own, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name}.{own}" if name else own, parameter


def _marks(model: nn.Module) -> dict[int, tuple[int, int]]:
    """Return which gradients there are, and how often each was written."""
    return {
        id(p): (id(p.grad), p.grad._version)
        for p in model.parameters()
        if p.grad is not None
    }


def _is_read(parameter: Tensor) -> bool:
    """Return whether an update of a matrix can be compared here."""
    grad = parameter.grad
    if parameter.ndim < 2 or grad is None or grad.layout is not torch.strided:
        return False
    return not is_dtensor(parameter) or local_part(parameter).numel() > 0


def _places(x: Tensor) -> Tensor:
    """Return this rank's numbers at places that are spread evenly."""
    flat = local_part(x).reshape(-1)
    return flat[:: max(1, flat.numel() // PLACES)][:PLACES]


def _trained(model: nn.Module) -> dict[str, Any]:
    """Return how much is trained, in which formats, and what is tied."""
    trained: dict[str, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            dtype = str(parameter.dtype).removeprefix("torch.")
            trained[dtype] = trained.get(dtype, 0) + parameter.numel()
    return {
        "trained": sum(trained.values()),
        "dtypes": trained,
        "ties": _ties(model),
        "writes": sum(p._version for p in model.parameters()),
    }


def _ties(model: nn.Module) -> list[list[str]]:
    """Return the names under which one parameter appears several times."""
    names: dict[int, list[str]] = {}
    for name, module in named(unwrapped(model)):
        for own, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{name}.{own}" if name else own
                names.setdefault(id(parameter), []).append(full)
    return [some for some in names.values() if len(some) > 1]


def _largest(model: nn.Module, record: LoopRecord) -> dict[str, Any]:
    """Return the largest entry by size of every weight, and of every buffer of numbers.

    A NaN is the largest: one number tells whether all are finite, or all are 0.
    """
    some = [(n, p) for n, p in parameters_of(model) if local_part(p).numel()]
    some = [(n, p) for n, p in some if p.is_floating_point()][:LISTED]
    buffers = [
        (name, buffer)
        for name, buffer in unwrapped(model).named_buffers()
        if buffer.is_floating_point() and buffer.numel() and not is_dtensor(buffer)
    ][:LISTED]
    if not some:
        return {}
    updates = [kept.updates for _, kept in record.of_the_model()]
    found: dict[str, Any] = {
        "names": [name for name, _ in some],
        "values": _largest_of([p.detach() for _, p in some]),
        "shapes": [list(p.shape) if p.ndim == 2 else [] for _, p in some],
        "trained": [p.requires_grad for _, p in some],
        "with_gradient": [p.grad is not None for _, p in some],
        "updates": max(updates, default=0),
    }
    if buffers:
        found["buffers"] = [name for name, _ in buffers]
        nans = [local_part(b).isnan().sum() for _, b in buffers]
        found["nan"] = torch.stack([count.to(nans[0].device) for count in nans])
    return found


def _largest_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute entry of each tensor; NaN where one is NaN."""
    parts = [local_part(x) for x in tensors]
    plain = [p.abs() if p.is_complex() else p for p in parts]
    norms = torch._foreach_norm(plain, float("inf"))
    return torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms])
