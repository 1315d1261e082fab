"""Facts of reach: whether the gradient comes to every stack of blocks that ran.

A stack runs, its weights are held by the optimiser that steps, and none of them has a
gradient: the graph was cut between it and the loss, or never made. One layer may be
left out on purpose, and the last ones may be unused; a whole stack is not. Of two
stacks, of which one looks at the other, both ran, be it before the model was called.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.sharding import local_part
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.loop_events import AnyUpdate, LoopEvent
from equipoise.probes.protocols import Guarded
from equipoise.watching.facts.forward import stack_of
from equipoise.watching.facts.loop_record import LoopRecord, held

PLACES = 8


@dataclass(slots=True)
class ReachFacts:
    """State of each stack that ran whether an update found gradients in it."""

    record: LoopRecord
    name: str = "reach"
    _ran: set[str] = field(default_factory=set)
    _crossed: bool = False
    """Whether attention looked at another sequence: an encoder's."""
    _stacks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def begin_step(self, step: int) -> None:
        self._ran, self._stacks, self._crossed = set(), {}, False

    def attach(
        self, anatomy: Anatomy, emit: Any, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        for name, block in anatomy.blocks.items():
            yield hooks.before(block, guarded(partial(self._runs, stack_of(name))))

    def _runs(self, stack: str, *_: Any) -> None:
        self._ran.add(stack)

    def on_attention(self, site: str, call: AttentionCall, emit: Any) -> None:
        """Note whether a stack looks at what another one made."""
        self._crossed |= call.cross

    def on_loop(self, event: LoopEvent) -> None:
        if self.record.armed and isinstance(event, AnyUpdate):
            self._look(event.optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        anatomy = self.record.anatomy
        if anatomy is None or not self._ran:
            return
        theirs = held(optimizer)
        own = [p for p in anatomy.model.parameters() if id(p) in theirs]
        if not any(p.grad is not None for p in own):
            return
        every = {stack_of(name) for name in anatomy.blocks}
        for stack in every if self._crossed and len(every) == 2 else self._ran:
            blocks = [b for n, b in anatomy.blocks.items() if stack_of(n) == stack]
            self._stacks[stack] = _state(blocks, theirs)

    def facts(self) -> Mapping[str, Any]:
        return {"stacks": dict(self._stacks)} if self._stacks else {}


def _state(blocks: list[nn.Module], theirs: set[int]) -> dict[str, Any]:
    """Return how many weights are to be trained, and how many have a gradient."""
    weights = [p for block in blocks for p in block.parameters() if p.requires_grad]
    mine = [p for p in weights if id(p) in theirs]
    found: dict[str, Any] = {
        "weights": len(weights),
        "held": len(mine),
        "graded": sum(p.grad is not None for p in weights),
    }
    if mine and not found["graded"]:
        found["mark"] = _mark(mine[0])
    return found


def _mark(parameter: Tensor) -> Tensor:
    """Return a number that changes when something writes to a weight."""
    some = local_part(parameter.detach()).reshape(-1)[:PLACES].double()
    place = torch.arange(1, len(some) + 1, device=some.device, dtype=some.dtype)
    total: Tensor = (some * place.sqrt()).sum()
    return total
