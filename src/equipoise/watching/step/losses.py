"""The losses of a step, and whether its backward passes reached the model."""

import weakref
from collections.abc import Sequence
from operator import is_
from typing import Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.sharding import local_part
from equipoise.watching.loop.optimizers import clipped_ids
from equipoise.watching.loop.torch_events import (
    added,
    inside_backward,
    joined_norm,
    mark_of,
)

Partial = Literal["", "no scalar", "replaced"]
MARKED = 16
"""Parameters looked at to tell whether a backward pass reached the model."""


class LossCollector:
    """Collects a step's losses, not those of another model (a teacher's, a critic's).

    A backward pass that changed the gradient of no parameter we look at is another
    model's. Where none seems to be this one's (all the marked parameters are unused),
    all count, if this one is trained. Gradients that were cleared begin anew: what was
    lost with them (an evaluation of LBFGS's closure, a batch whose step was left out)
    does not count.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        self._new_state = not any(one.state for one in optimizers)
        self._clipped: dict[frozenset[int], Tensor] = {}
        """Ids of parameters that were clipped in this step → their norm."""
        self.mark(model)
        # A teacher's: losses that reach no parameter of it may be of any model.
        self._frozen = not optimizers and not self._marked
        self._before: list[tuple[int, int] | None] = []
        self._after: list[tuple[int, int] | None] = []
        self._weights: list[int] = []
        self.ever_reached_model = False
        self.cleared = 0
        """Batches whose gradients were cleared without a step."""
        self.weights_moved = False
        """Whether weights changed between the last two backward passes."""
        self._own: Tensor | None = None
        self._others: Tensor | None = None
        self._used: dict[int, Tensor] = {}
        """Each of several optimisers → the loss whose gradients it used last."""
        self._phases = False
        """Whether one of several has stepped: what is cleared now is not lost."""
        self.reached_model = False
        """Whether a backward pass of this step reached the model."""
        self._partial: Partial = ""
        """Why the losses that were seen may not be all of the objective."""
        self._running: Tensor | None = None
        """The loss whose backward pass is under way."""
        self._ended = False
        """Whether a step ended inside that pass."""

    def mark(self, model: nn.Module) -> None:
        """Choose the parameters to look at."""
        self._model = weakref.ref(model)
        trainable = [p for p in model.parameters() if p.requires_grad]
        self._marked = trainable[:: max(1, len(trainable) // MARKED)]

    @property
    def step_is_over(self) -> bool:
        """Whether the next step's gradients are still to come."""
        return self.ever_reached_model and not self.reached_model

    def before_backward(self, loss: Tensor | None, *, in_closure: bool) -> bool:
        """Return whether gradients of a batch were cleared without a step."""
        self._before, self._running, self._ended = self._state(), loss, False
        # On an accelerator this waits, so it is asked only after a write to gradients.
        written = self.reached_model and self._before != self._after
        lost = (written or in_closure) and self._all_zero()
        cleared = lost and self.reached_model and not (in_closure or self._phases)
        self.cleared += cleared
        if lost:
            self._begin_anew()
        self.weights_moved = self.moved_since()
        self._weights = [p._version for p in self._marked]
        return cleared

    def moved_since(self) -> bool:
        """Return whether weights changed after the last backward pass that was seen."""
        weights = [p._version for p in self._marked]
        return bool(self._weights) and weights != self._weights

    def note_phase(self, optimizer: Optimizer) -> None:
        """Keep the loss so far: one of several optimisers has used its gradients.

        The last loss of one that steps often in a training step counts, not the sum,
        which would jump with their number.
        """
        part = self._others if self._own is None else self._own
        if part is not None:
            self._used[id(optimizer)] = part
        self._own = self._others = None
        self._phases = True

    def unseen_step(self, optimizers: Sequence[Optimizer]) -> bool:
        """Return whether an optimiser has stepped since watching began, seen or not."""
        stepped = any(one.state for one in optimizers)
        # State alone says little of a step that raised, once gradients were seen.
        return stepped and (self.moved_since() if self._weights else self._new_state)

    def clipped(
        self, norm: Tensor, parameters: object, optimizers: Sequence[Optimizer]
    ) -> Tensor | None:
        """Return the norm of all that was clipped in this step; of another model none.

        Who clips layer by layer clips parts of one gradient; of what is clipped twice
        the last norm counts.
        """
        if not isinstance(parameters, list | tuple | Tensor):
            return norm  # a generator must not be used up
        ids = clipped_ids(parameters, self._model(), optimizers)
        if ids is None:
            return None
        others = {k: v for k, v in self._clipped.items() if k.isdisjoint(ids)}
        self._clipped = {**others, ids: norm}
        return norm if not others else joined_norm([*self._clipped.values()])

    def after_backward(self, loss: Tensor | None) -> bool:
        """Add a loss, and return whether its backward pass reached the model."""
        self._after = self._state()
        reached = self._after != self._before or self._replaced()
        self.ever_reached_model = self.ever_reached_model or reached
        self._running = None
        if self._ended:
            return reached
        self.reached_model |= reached
        if loss is None:
            self._partial = "no scalar" if reached else self._partial
        elif reached:
            self._own = added(self._own, loss)
        else:
            self._others = added(self._others, loss)
        return reached

    def _replaced(self) -> bool:
        """Return whether the model has other parameters now, and they have gradients.

        Weights are assigned, not copied, by ``load_state_dict(assign=True)``.
        """
        marked, model = self._marked, self._model()
        if model is not None:
            self.mark(model)
        same = len(marked) == len(self._marked) and all(map(is_, marked, self._marked))
        self._after = self._state()
        return not same and any(self._after)

    def gradients_replaced(self) -> bool:
        """Return whether the loop has set other gradients since the last pass, once."""
        before, self._after = self._after, self._state()
        pairs = zip(before, self._after, strict=False) if self.reached_model else ()
        other = any(now and (not old or now[0] != old[0]) for old, now in pairs)
        self._partial = "replaced" if other else self._partial
        return other

    def pop(self) -> tuple[Tensor | None, bool, Partial]:
        """Return the step's loss, if a pass reached the model, and if it is partial."""
        total = self._others if self._own is None else self._own
        if self._frozen and self._own is None:
            total = None
        if total is None and inside_backward():  # not of a pass that raised
            total = self._running
        for part in self._used.values():
            total = added(total, part)
        popped = total, self.reached_model or self._phases, self._partial
        self._begin_anew()
        self._used, self._phases = {}, False
        self._running, self._ended, self._clipped = None, True, {}
        return popped

    def _begin_anew(self) -> None:
        self._own = self._others = None
        self.reached_model, self._partial = False, ""

    def _state(self) -> list[tuple[int, int] | None]:
        return [mark_of(p.grad) for p in self._marked]

    def _all_zero(self) -> bool:
        """Return whether gradients were cleared, in place or not."""
        grads = (p.grad for p in self._marked if p.grad is not None)
        return not any(bool(local_part(grad).any()) for grad in grads)
