"""Makes the step machine's events of what torch does in the loop.

Here the loop is looked at: which optimiser steps, what became of gradients. What it
means for the step is the machine's to say.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.probes.loop_events import LoopEvent
from equipoise.watching.loop.gradient_marks import GradientMarks
from equipoise.watching.loop.optimizers import (
    Relations,
    Round,
    clipped_ids,
    is_stepping,
    successors,
)
from equipoise.watching.loop.torch_events import inside_backward, notify_tracing
from equipoise.watching.step.machine import (
    BackwardBegins,
    BackwardEnds,
    Clipped,
    Event,
    Gradients,
    Role,
    ScalerUpdated,
    Step,
    StepCalled,
    UpdateBegins,
    UpdateEnds,
)

Notice = Callable[..., None]
"""Called with a function that makes an event, if there is one, and its arguments."""


class LoopObserver:
    """A ``LoopListener`` that hands each event to the machine."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        notice: Notice,
        step: Callable[[], Step],
        tracing: int,
        count: Callable[[LoopEvent], None],
    ) -> None:
        self._model, self._notice, self._step = model, notice, step
        self._count = count
        self.marks = GradientMarks(model, optimizers)
        self._relations, self._tracing = Relations(model), tracing
        self.follow(optimizers)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        return self._round.optimizers

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Count the steps of these optimisers from now on."""
        self._round = Round(optimizers)
        self._relations.follow(optimizers, self._report_tracing)

    def take_over(self, optimizer: Optimizer) -> None:
        """Count the steps of this one, which has just made one, in another's place."""
        self.follow(successors(self.optimizers, optimizer))
        self._round.over(optimizer, ())

    def close(self) -> None:
        """Leave the optimisers."""
        self._relations.close()

    # Called by torch, in the order of a training step.

    def on_loop(self, event: LoopEvent) -> None:
        """Have it counted: the machine does not need to know."""
        self._count(event)

    def before_backward(self, loss: Tensor | None, roots: Sequence[Tensor]) -> None:
        self._notice(self._backward_begins, loss, roots)

    def after_backward(self, loss: Tensor | None, scale: Tensor | None) -> None:
        self._notice(self._backward_ends, loss, scale)

    def before_clipping(self, part: Tensor, parameters: object) -> None:
        self._notice(self._clipped, part, parameters)

    def after_scaler_update(self, asked: Collection[int]) -> None:
        self._notice(self._scaler_updated, asked)

    def before_update(self, optimizer: Optimizer, *, closure: bool) -> None:
        self._notice(self._update_begins, optimizer, closure)

    def after_update(self, optimizer: Optimizer) -> None:
        self._notice(self._update_ends, optimizer)

    def step_called(self, loss_given: bool) -> Event | None:
        """Return the event of the user's ``.step()``: with an optimiser there is none.

        The optimiser's own step has ended the step of the training already.
        """
        given = StepCalled(loss_given=loss_given, in_backward=inside_backward())
        return None if self.optimizers else given

    def _backward_begins(
        self, loss: Tensor | None, roots: Sequence[Tensor]
    ) -> Event | None:
        reached, inside = self._step().reached == "yes", self._inside_update()
        lost, moved = self.marks.pass_begins(reached=reached, in_update=inside)
        return BackwardBegins(loss, tuple(roots), lost, moved, inside)

    def _backward_ends(self, loss: Tensor | None, scale: Tensor | None) -> Event | None:
        reached = self.marks.pass_ends()
        # A loss that reaches no parameter of a teacher may be any model's.
        foreign = not (reached or self.optimizers) and self.marks.frozen
        gradients = self._gradients(again=False)
        return BackwardEnds(None if foreign else loss, scale, reached, gradients)

    def _clipped(self, norm: Tensor, parameters: Any) -> Event | None:
        ids = None
        if isinstance(parameters, list | tuple | Tensor):
            ids = clipped_ids(parameters, self._model, self.optimizers)
            if ids is None:
                return None
        return Clipped(norm, ids, self._gradients(again=True))

    def _scaler_updated(self, asked: Collection[int]) -> Event | None:
        skipped = bool(self.optimizers) and self._round.skipped(asked)
        return ScalerUpdated(skipped) if skipped else None

    def _update_begins(self, optimizer: Optimizer, closure: bool) -> Event | None:
        if not self.optimizers:
            return None
        role = self._role(optimizer)
        late = closure or inside_backward()
        look = role == "counted" and not late
        return UpdateBegins(
            optimizer,
            role,
            in_update=role != "counted" and self._inside_update(),
            late_gradients=late,
            gradients=self._gradients(again=True) if look else Gradients(),
        )

    def _update_ends(self, optimizer: Optimizer) -> Event | None:
        if not self.optimizers:
            return None
        role = self._role(optimizer)
        if role == "counted":
            ends = self._round.over(optimizer, self._step().stepped)
        else:  # it may take over, and then several make up a step as before
            ends = len(self.optimizers) == 1 or len(self._after(optimizer, role)) == 1
        return UpdateEnds(optimizer, role, ends, in_backward=inside_backward())

    def _after(self, optimizer: Optimizer, role: Role) -> Sequence[Optimizer]:
        away = role == "another model"
        return () if away else successors(self.optimizers, optimizer)

    def _role(self, optimizer: Optimizer) -> Role:
        if any(optimizer is one for one in self.optimizers):
            return "counted"
        return self._relations.of(optimizer, self.optimizers)

    def _inside_update(self) -> bool:
        return self._step().updating and is_stepping(self.optimizers)

    def _gradients(self, *, again: bool) -> Gradients:
        step = self._step()
        if not step.sampled:
            return Gradients()
        replaced = again and self.marks.set_anew() and step.reached == "yes"
        present = any(p.grad is not None for p in self._model.parameters())
        return Gradients(present=present, replaced=replaced)

    def _report_tracing(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called by torch after a step; only one that is being compiled is of use."""
        if torch.compiler.is_compiling():
            notify_tracing(self._tracing)
