"""Facts of the optimisers: who they are, what they hold, and what they keep."""

import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.sites import named
from equipoise.probes.loop_events import AnyUpdate, LoopEvent
from equipoise.probes.optimizer_kinds import update_kind
from equipoise.probes.protocols import Emit
from equipoise.watching.facts.loop_record import LoopRecord, OptimizerRecord, held

EPSILON = ("eps", "epsilon")
Numbers = dict[str, Any]


@dataclass(slots=True)
class OptimizerFacts:
    """The optimisers that step the model, and what of it none of them holds."""

    record: LoopRecord
    name: str = "optimizers"
    _before: dict[int, "Kept"] = field(default_factory=dict)
    """Id of an optimiser → what it kept and was given as its update began."""
    _after: dict[int, "Kept"] = field(default_factory=dict)
    _graded: set[int] = field(default_factory=set)
    """Ids of the weights that had a gradient as an update of the step began."""
    _frozen: set[int] | None = None
    """Ids of the weights that were frozen in the first sampled step."""
    _others: "weakref.WeakSet[Optimizer] | None" = None
    """Every optimiser of this process, once one was looked for."""

    def begin_step(self, step: int) -> None:
        self._before.clear()
        self._after.clear()
        self._graded.clear()
        if self._frozen is None and self.record.model is not None:
            still = (p for p in self.record.model.parameters() if not p.requires_grad)
            self._frozen = set(map(id, still))

    def on_loop(self, event: LoopEvent) -> None:
        model = self.record.model
        if self.record.armed and isinstance(event, AnyUpdate) and model is not None:
            self._before.setdefault(id(event.optimizer), kept_by(event.optimizer))
            self._graded |= {id(p) for p in model.parameters() if p.grad is not None}

    def on_update(self, optimizer: Optimizer, emit: Emit) -> None:
        self._after[id(optimizer)] = kept_by(optimizer)

    def facts(self) -> Mapping[str, Any]:
        model, known = self.record.model, list(self.record.of_the_model())
        if model is None or not known:
            return {}
        every = set[int]().union(*(held(optimizer) for optimizer, _ in known))
        unheld = self._unheld(model, every)
        if unheld["names"] and max(kept.updates for _, kept in known) > 1:
            every = every.union(*map(held, self._all_there_are()))
            unheld = self._unheld(model, every)
        return {
            "each": [self._stated(optimizer, kept) for optimizer, kept in known],
            "unheld": unheld,
        }

    def _unheld(self, model: nn.Module, every: set[int]) -> Numbers:
        return _unheld(model, every, graded=self._graded, frozen=self._frozen or set())

    def _all_there_are(self) -> "weakref.WeakSet[Optimizer]":
        """Return every optimiser, also one that steps rarely and was not seen yet."""
        if self._others is None:
            # By type: isinstance asks an object for its class, which may import.
            found = (o for o in gc.get_objects() if issubclass(type(o), Optimizer))
            self._others = weakref.WeakSet(found)
        return self._others

    def _in_place_of_named(self, optimizer: Optimizer) -> bool:
        """Return whether it steps parameters of a named one that has never stepped.

        Not where both share their groups: a wrapper, and the optimiser inside it.
        """
        if self.record.is_named(optimizer):
            return False
        theirs, groups = held(optimizer), set(map(id, optimizer.param_groups))
        overlapping = [
            (one, self.record.optimizers.get(one))
            for one in (reference() for reference in self.record.named)
            if one is not None and not theirs.isdisjoint(held(one))
        ]
        return bool(overlapping) and all(
            (kept is None or not kept.updates)
            and groups.isdisjoint(map(id, one.param_groups))
            for one, kept in overlapping
        )

    def _stated(self, optimizer: Optimizer, kept: OptimizerRecord) -> Numbers:
        own = self.record.own()
        before = self._before.get(id(optimizer))
        after = self._after.get(id(optimizer))
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        ours = [p for p in parameters if id(p) in own]
        return {
            "class": type(optimizer).__name__,
            "named": self.record.is_named(optimizer),
            "updates": kept.updates,
            "parameters": sum(p.numel() for p in ours),
            "foreign": sum(p.numel() for p in parameters)
            - sum(p.numel() for p in ours),
            "trainable": sum(p.requires_grad for p in parameters),
            "stepped": before is not None,
            **({} if before is None else {"before": before._asdict()}),
            **({} if after is None else {"after": after._asdict()}),
            "in_place_of_named": self._in_place_of_named(optimizer),
            "groups": [_group(optimizer, group) for group in optimizer.param_groups],
            "moments": _moments(optimizer),
        }


class Kept(NamedTuple):
    """What an optimiser keeps, and what it is given."""

    moments: int
    """Parameters of which it keeps moments: a count of steps is none."""
    gradients: int
    """Trainable parameters with a gradient."""


def kept_by(optimizer: Optimizer) -> Kept:
    """Return how much an optimiser keeps and is given now."""
    states = (s for s in optimizer.state.values() if isinstance(s, dict))
    moments = sum(any(_is_moment(k, x) for k, x in s.items()) for s in states)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return Kept(moments, sum(p.grad is not None for p in parameters))


def _is_moment(name: object, value: object) -> bool:
    return isinstance(value, Tensor) and name != "step"


def _group(optimizer: Optimizer, group: Mapping[str, Any]) -> Numbers:
    rate = group.get("lr")
    found: Numbers = {
        "parameters": sum(p.numel() for p in group["params"]),
        "kind": update_kind(optimizer, group),
        "decay": float(group.get("weight_decay") or 0.0),
    }
    if isinstance(rate, Tensor):
        found["rate"] = rate.detach().clone()
    elif rate is not None:
        found["rate"] = float(rate)
    return found


def _moments(optimizer: Optimizer) -> Numbers:
    """Return the dtype of the moments, beside ε: in too narrow a format ε is 0."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    epsilon = next((group[name] for name in EPSILON if name in group), None)
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if _is_moment(key, value) and value.is_floating_point():
                dtype = str(value.dtype).removeprefix("torch.")
                known = isinstance(epsilon, int | float)
                return {"dtype": dtype} | ({"epsilon": epsilon} if known else {})
    return {}


def _unheld(
    model: nn.Module, every: set[int], *, graded: set[int], frozen: set[int]
) -> Numbers:
    """Return the trainable weights that no optimiser holds.

    Single numbers are left out of names: a learnt temperature may be set by hand.
    """
    seen, names, numbers = set[int](), [], 0
    with_gradient = trainable = unfrozen = matrices = 0
    for name, module in named(model):
        for own, parameter in module._parameters.items():
            if (
                parameter is None
                or id(parameter) in seen
                or not parameter.requires_grad
            ):
                continue
            seen.add(id(parameter))
            trainable += parameter.numel()
            if id(parameter) in every:
                continue
            numbers += parameter.numel()
            if parameter.numel() > 1:
                matrices += parameter.ndim > 1
                has_one = parameter.grad is not None or id(parameter) in graded
                names.append(f"{name}.{own}" if name else own)
                with_gradient += parameter.numel() * has_one
                unfrozen += parameter.numel() * (has_one and id(parameter) in frozen)
    return {
        "trainable": trainable,
        "parameters": numbers,
        "matrices": matrices,
        "with_gradient": with_gradient,
        "unfrozen": unfrozen,
        "names": names[:4],
        "count": len(names),
    }
