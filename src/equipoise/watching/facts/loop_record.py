"""Counts what the loop does between samples; the readers of the loop's facts share it.

Off-sample it keeps a few Python numbers for each optimiser and schedule. It holds none
of them: what the loop drops is forgotten.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.sharding import is_dtensor, local_part
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.loop_events import (
    AnyBackward,
    AnyUpdate,
    GradientsClipped,
    LoopEvent,
    LossScaled,
    ScheduleMoves,
)
from equipoise.probes.protocols import WithAnatomy

REMEMBERED = 8
"""Updates of which moves and rates are kept."""
END = ("T_max", "total_iters", "total_steps")
"""What schedules call the number of moves after which they are over."""


@dataclass(slots=True)
class OptimizerRecord:
    """What one optimiser was seen to do."""

    updates: int = 0
    passes: int = 0
    """Backward passes since its last update."""
    rates: deque[tuple[float, ...] | None] = field(
        default_factory=lambda: deque(maxlen=REMEMBERED)
    )
    """The rate of each group at its last updates; None where asking would wait."""
    passes_each: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    at_zero: int = 0
    """Updates in a row, up to now, at which all its rates were 0."""
    was_above_zero: bool = False
    restarts: list[dict[str, Any]] = field(default_factory=list)
    """Schedules that began again before the one before them was over."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """The schedule that moved it last."""
    begun_again: dict[str, Any] = field(default_factory=dict)
    """One like it that was made since the last update."""


@dataclass(slots=True)
class ScheduleRecord:
    """What one schedule was seen to do."""

    kind: str
    optimizer: "weakref.ref[Optimizer]"
    total: int = 0
    moves: int = 0
    """Since the last update of its optimiser."""
    moves_each: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    begun: Mapping[int, int] = field(default_factory=dict)
    """Id of an optimiser → its updates when this schedule first moved."""


@dataclass(slots=True)
class Clip:
    """One call that clipped gradients in a sampled step."""

    largest: float
    passes: int
    """Backward passes of the step before it."""
    norm: Tensor
    own: Tensor | None
    """The norm of the gradients that it scales, where the loop gave ``norm``."""
    own_largest: Tensor | None
    """Their largest entry: the norm of another order."""
    scaled: bool
    """Whether the gradients still carry a scaler's factor."""
    nothing: bool = False
    """Whether it was given no weight at all: ``parameters()`` twice, used up once."""
    sharded: bool = False
    """Whether it scales shards by a number that the loop gave, of this rank alone."""


@dataclass(slots=True)
class LoopRecord(WithAnatomy):
    """Follows backward passes, updates, clipping, scalers and schedules."""

    named: Sequence["weakref.ref[Optimizer]"] = ()
    """The optimisers that ``watch`` was given."""
    name: str = "loop record"
    armed: bool = False
    step: int = 0
    optimizers: "weakref.WeakKeyDictionary[Optimizer, OptimizerRecord]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    schedules: "weakref.WeakKeyDictionary[Any, ScheduleRecord]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    passes: int = 0
    """Backward passes of the sampled step."""
    clips: list[Clip] = field(default_factory=list)
    scaler: "weakref.ref[Any] | None" = None
    _scaled: bool = False
    """Whether a loss was scaled since the last update."""

    def begin_step(self, step: int) -> None:
        """Begin a sampled step."""
        self.armed, self.step, self.passes = True, step, 0
        self.clips.clear()

    def end_sample(self) -> None:
        """Read no numbers until the next sampled step."""
        self.armed = False

    @property
    def model(self) -> nn.Module | None:
        return None if self._anatomy is None else self._anatomy.model

    @property
    def anatomy(self) -> Anatomy | None:
        return self._anatomy

    def own(self) -> set[int]:
        """Return the ids of the model's parameters."""
        return (
            set(map(id, self.model.parameters())) if self.model is not None else set()
        )

    def of_the_model(self) -> Iterator[tuple[Optimizer, OptimizerRecord]]:
        """Yield the optimisers that step this model, or were named."""
        own, named = self.own(), [one() for one in self.named]
        known = {id(one): one for one in named if one is not None}
        known |= {id(o): o for o in self.optimizers if not own.isdisjoint(held(o))}
        for optimizer in known.values():
            yield optimizer, self.optimizers.get(optimizer, OptimizerRecord())

    def is_named(self, optimizer: Optimizer) -> bool:
        return any(one() is optimizer for one in self.named)

    def on_loop(self, event: LoopEvent) -> None:
        match event:
            case AnyBackward():
                self.passes += 1
                for record in self.optimizers.values():
                    record.passes += 1
            case AnyUpdate(optimizer):
                self._update(optimizer)
            case ScheduleMoves(schedule, initial):
                self._schedule(schedule, initial=initial)
            case LossScaled(scaler):
                self.scaler, self._scaled = weakref.ref(scaler), True
            case GradientsClipped() if self.armed:
                self._clip(event)

    def _update(self, optimizer: Optimizer) -> None:
        record = self.optimizers.setdefault(optimizer, OptimizerRecord())
        before, now = record.rates[-1] if record.rates else None, rates_of(optimizer)
        again, record.begun_again = record.begun_again, {}
        if again and before and now and now[0] > before[0] * (1 + 1e-6):
            record.restarts.append({**again, "before": before[0], "rate": now[0]})
        record.updates, self._scaled = record.updates + 1, False
        record.rates.append(now)
        record.passes_each.append(record.passes)
        record.passes = 0
        if now is not None:
            zero = not any(now)
            record.at_zero = record.at_zero + 1 if zero else 0
            record.was_above_zero |= not zero
        for schedule in self.schedules.values():
            if schedule.optimizer() is optimizer:
                schedule.moves_each.append(schedule.moves)
                schedule.moves = 0

    def _schedule(self, schedule: Any, *, initial: bool) -> None:
        optimizer = moved_by(schedule)
        if optimizer is None:
            return
        record = self.optimizers.setdefault(optimizer, OptimizerRecord())
        if initial:
            before, new = record.schedule, settings_of(schedule)
            unfinished = 0 < before.get("at", 0) < before.get("end", 0)
            if unfinished and before["settings"] == new:
                kept = {name: before[name] for name in ("kind", "at", "end")}
                record.begun_again = kept
            return
        known = self.schedules.get(schedule)
        if known is None:
            begun = {id(o): r.updates for o, r in self.optimizers.items()}
            kind = type(schedule).__name__
            known = ScheduleRecord(kind, weakref.ref(optimizer), begun=begun)
            self.schedules[schedule] = known
        known.moves, known.total = known.moves + 1, known.total + 1
        at = getattr(schedule, "last_epoch", -1) + 1
        end = next((getattr(schedule, n) for n in END if hasattr(schedule, n)), 0)
        record.schedule = {
            "kind": known.kind,
            "at": at,
            "end": end,
            "settings": settings_of(schedule),
        }

    def _clip(self, clipped: GradientsClipped) -> None:
        some = clipped.parameters
        copies = (held(o) for o, _ in self.of_the_model())
        ours = self.own().union(*copies)
        if some and not any(id(p) in ours for p in some):
            return
        grads = [p.grad for p in some or () if p.grad is not None]
        own = own_largest = None
        plain = not any(map(is_dtensor, grads)) and not is_dtensor(clipped.norm)
        if clipped.given and grads and plain:
            own, own_largest = norm_of(grads, 2.0), norm_of(grads, float("inf"))
        self.clips.append(
            Clip(
                largest=clipped.largest,
                passes=self.passes,
                norm=local_part(clipped.norm).clone(),
                own=own,
                own_largest=own_largest,
                scaled=self._still_scaled(some),
                nothing=some is not None and not some,
                sharded=clipped.given
                and not is_dtensor(clipped.norm)
                and any(map(is_dtensor, grads)),
            )
        )

    def _still_scaled(self, parameters: Sequence[Tensor] | None) -> bool:
        """Return whether a scaler is in force that has not unscaled these gradients."""
        scaler = self.scaler() if self.scaler is not None else None
        if scaler is None or not self._scaled or parameters is None:
            return False
        if not scaler.is_enabled():
            return False
        ids = set(map(id, parameters))
        states = getattr(scaler, "_per_optimizer_states", {})
        holders = [o for o in self._known() if not ids.isdisjoint(held(o))]
        stages = [states[id(o)]["stage"].name for o in holders if id(o) in states]
        return bool(holders) and all(stage == "READY" for stage in stages)

    def _known(self) -> list[Optimizer]:
        named = (one() for one in self.named)
        found = {id(o): o for o in (*named, *self.optimizers) if o is not None}
        return list(found.values())


def held(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters of an optimiser."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def rates_of(optimizer: Optimizer) -> tuple[float, ...] | None:
    """Return the rate of each group; None if one is on a device, or there is none."""
    found = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if rate is None or (isinstance(rate, Tensor) and not rate.is_cpu):
            return None
        found.append(float(rate))
    return tuple(found)


def moved_by(schedule: Any) -> Optimizer | None:
    """Return the optimiser whose rates a schedule sets, inside what wraps it."""
    found = getattr(schedule, "optimizer", None)
    while found is not None and not isinstance(found, Optimizer):
        found = getattr(found, "optimizer", None)
    inner = getattr(found, "optimizer", None)  # Accelerate's is an Optimizer itself
    return inner if isinstance(inner, Optimizer) else found


def settings_of(schedule: Any) -> dict[str, Any]:
    """Return the settings of a schedule."""
    given = vars(schedule).items()
    numbers = {k: v for k, v in given if k[0] != "_" and isinstance(v, int | float)}
    numbers.pop("last_epoch", None)
    rates = [float(rate) for rate in getattr(schedule, "base_lrs", ())]
    return {"class": type(schedule).__name__, "rates": rates, **numbers}


def norm_of(grads: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of several gradients together."""
    device = grads[0].device
    norms = [_wide_norm(grad, order).to(device) for grad in grads if not grad.is_sparse]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
    return total


def _wide_norm(grad: Tensor, order: float) -> Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(grad, order, dtype=wide)
    return norm
