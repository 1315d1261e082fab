"""Which optimiser steps what: those whose steps count, and others of their model."""

import sys
import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

Hook = Callable[[Optimizer, Any, Any], None]
Relation = Literal["same parameters", "same model", "another model"]
LONGEST = 256
"""Updates of one optimiser in a training step, after which the others sit out."""


class Round:
    """Tells when a training step is over that several optimisers make together.

    It is over when the one has stepped that is last in the loop's own order, as the
    first round shows it: phases of a GAN are one step, however often one side steps in
    it. Until all have stepped once, those that do make up the step.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self._ever: set[int] = set()
        self._last: int | None = None
        """Id of the one that ends the step."""

    def over(self, optimizer: Optimizer, stepped: Sequence[int]) -> bool:
        """Note that an optimiser has stepped; return whether the training step ends.

        ``stepped`` are the ids of those that have in this step, each as often as it
        did.
        """
        mine = id(optimizer)
        if len(self._ever) == len(self.optimizers):
            if stepped.count(mine) >= LONGEST:
                self._ever, self._last = set(), None
                return True
            return mine == self._last
        self._ever.add(mine)
        if len(self._ever) == len(self.optimizers):
            self._last = mine
        elif self._last is None and mine in stepped:
            self._last = stepped[-1]
            return True
        return mine == self._last

    def skipped(self, asked: Container[int]) -> bool:
        """Return whether it ends at a scaler's update, which has just been made.

        ``asked`` are ids of the optimisers that the scaler was told to step: after an
        overflow it leaves them out, and no step of theirs is seen.
        """
        last = list(map(id, self.optimizers)) if self._last is None else [self._last]
        return len(self.optimizers) == 1 or all(one in asked for one in last)


class Relations:
    """How other optimisers relate to those whose steps count, and to their model."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._hooks = model, ExitStack()
        self._known: weakref.WeakKeyDictionary[Optimizer, Relation] = (
            weakref.WeakKeyDictionary()
        )
        self._trains = False
        """Whether the counted optimisers held parameters of the model."""

    def of(self, optimizer: Optimizer, counted: Sequence[Optimizer]) -> Relation:
        if not counted:
            return "another model"
        if optimizer not in self._known:
            self._known[optimizer] = self._compared(optimizer, counted)
        return self._known[optimizer]

    def follow(self, optimizers: Sequence[Optimizer], after: Hook) -> None:
        """Compare others with these from now on; call ``after`` after their steps."""
        self.close()
        own = set(map(id, self._model.parameters()))
        self._trains = not own.isdisjoint(_held(*optimizers))
        for optimizer in optimizers:
            self._hooks.callback(optimizer.register_step_post_hook(after).remove)

    def close(self) -> None:
        """Leave the optimisers, and compare others anew."""
        self._known.clear()
        self._hooks.close()

    def _compared(self, optimizer: Optimizer, counted: Sequence[Optimizer]) -> Relation:
        if any(optimizer is one for one in counted):
            return "same parameters"
        theirs, counted_ids = _held(optimizer), _held(*counted)
        own = set(map(id, self._model.parameters()))
        # The counted optimisers have parameters that were replaced, or frozen since.
        moving = {id(p) for p in self._model.parameters() if p.requires_grad}
        stale = self._trains and counted_ids.isdisjoint(moving)
        if theirs & counted_ids or (stale and theirs & own):
            return "same parameters"
        return "same model" if theirs & own else "another model"


# One code object for the wrapper that torch puts around every optimiser's step.
_STEP = Optimizer.profile_hook_step(len).__code__


def is_stepping(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether a step of one is under way; one that raised has left no frame."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            stepping = frame.f_locals.get("self") if frame.f_code is _STEP else None
            if any(stepping is one for one in optimizers):
                return True
            frame = frame.f_back
    return False


def successors(
    counted: Sequence[Optimizer], optimizer: Optimizer
) -> tuple[Optimizer, ...]:
    """Return whose steps count once another optimiser has taken over parameters."""
    theirs = _held(optimizer)
    kept = [one for one in counted if theirs.isdisjoint(_held(one))]
    return (optimizer,) if len(counted) == 1 else (*kept, optimizer)


def _held(*optimizers: Optimizer) -> set[int]:
    groups = (group for one in optimizers for group in one.param_groups)
    return {id(p) for group in groups for p in group["params"]}


def clipped_ids(
    parameters: Tensor | Sequence[Tensor],
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
) -> frozenset[int] | None:
    """Return the ids of what is clipped; None if it is another model's."""
    some = [parameters] if isinstance(parameters, Tensor) else parameters
    ids = frozenset(map(id, some))
    own = model.parameters() if model is not None else ()
    # The optimiser may have copies in another precision.
    copies = _held(*optimizers)
    known = not ids or any(id(p) in ids for p in own) or not ids.isdisjoint(copies)
    return ids if known else None
