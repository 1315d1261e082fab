"""Which optimiser steps what: the one whose steps count, and others of its model."""

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

Hook = Callable[[Optimizer, Any, Any], None]
Relation = Literal["same parameters", "same model", "another model", "wrapper"]


class Relations:
    """How other optimisers relate to the one whose steps count, and to its model."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._hooks = model, ExitStack()
        self._known: weakref.WeakKeyDictionary[Optimizer, Relation] = (
            weakref.WeakKeyDictionary()
        )
        self._began: weakref.WeakKeyDictionary[Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        """At which step the step of an optimiser under way began."""
        self._trains = False
        """Whether the counted optimiser held parameters of the model."""

    def begin(self, optimizer: Optimizer, counted: Optimizer | None, step: int) -> bool:
        """Note that an optimiser steps, and return whether it moves this model."""
        self._began[optimizer] = step
        return self.of(optimizer, counted) != "another model"

    def end(
        self, optimizer: Optimizer, counted: Optimizer | None, step: int
    ) -> Relation:
        """Note that it has stepped: one whose step held a counted one is a wrapper."""
        inside = self._began.pop(optimizer, step) != step
        return "wrapper" if inside else self.of(optimizer, counted)

    def of(self, optimizer: Optimizer, counted: Optimizer | None) -> Relation:
        if counted is None:
            return "another model"
        if optimizer not in self._known:
            self._known[optimizer] = self._compared(optimizer, counted)
        return self._known[optimizer]

    def follow(self, optimizer: Optimizer, after: Hook) -> None:
        """Call this after each step of this optimiser, which counts from now on."""
        self.close()
        own = set(map(id, self._model.parameters()))
        self._trains = not own.isdisjoint(_held(optimizer))
        self._hooks.callback(optimizer.register_step_post_hook(after).remove)

    def close(self) -> None:
        """Leave the optimiser, and compare others anew."""
        self._known.clear()
        self._hooks.close()

    def _compared(self, optimizer: Optimizer, counted: Optimizer) -> Relation:
        theirs, counted_ids = _held(optimizer), _held(counted)
        own = set(map(id, self._model.parameters()))
        # The counted optimiser has parameters that were replaced, or frozen since.
        moving = {id(p) for p in self._model.parameters() if p.requires_grad}
        stale = self._trains and counted_ids.isdisjoint(moving)
        if theirs & counted_ids or (stale and theirs & own):
            return "same parameters"
        return "same model" if theirs & own else "another model"


# One code object for the wrapper that torch puts around every optimiser's step.
_STEP = Optimizer.profile_hook_step(len).__code__


def is_stepping(optimizer: Optimizer | None) -> bool:
    """Return whether a step of it is under way; one that raised has left no frame."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code is _STEP and frame.f_locals.get("self") is optimizer:
                return True
            frame = frame.f_back
    return False


def _held(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def clipped_ids(
    parameters: Tensor | Sequence[Tensor],
    model: nn.Module | None,
    optimizer: Optimizer | None,
) -> frozenset[int] | None:
    """Return the ids of what is clipped; None if it is another model's."""
    some = [parameters] if isinstance(parameters, Tensor) else parameters
    ids = frozenset(map(id, some))
    own = model.parameters() if model is not None else ()
    # The optimiser may have copies in another precision.
    copies = _held(optimizer) if optimizer is not None else ()
    known = not ids or any(id(p) in ids for p in own) or not ids.isdisjoint(copies)
    return ids if known else None
