"""Whether a backward pass reached the model, and what moved between two of them.

Nothing is copied: a gradient that was written to has another version, and one that was
made anew another identity. Some parameters stand for all.
"""

import weakref
from collections.abc import Sequence
from operator import is_

from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.sharding import local_part

MARKED = 16
"""Parameters looked at to tell whether a backward pass reached the model."""
Mark = tuple[int, int] | None


class GradientMarks:
    """What gradients and weights looked like at the last backward pass."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        self._states = sum(len(one.state) for one in optimizers)
        self.follow(model)
        self._before: list[Mark] = []
        self._after: list[Mark] = []
        self._weights: list[int] = []

    def follow(self, model: nn.Module) -> None:
        """Choose the parameters to look at."""
        self._model = weakref.ref(model)
        trainable = [p for p in model.parameters() if p.requires_grad]
        self._marked = trainable[:: max(1, len(trainable) // MARKED)]

    @property
    def frozen(self) -> bool:
        """Whether no parameter is trained: as a teacher's."""
        return not self._marked

    def pass_begins(self, *, reached: bool, in_update: bool) -> tuple[bool, bool]:
        """Return whether gradients were cleared, and weights moved, since the last.

        ``reached`` says that the step has gradients already.
        """
        self._before = self._now()
        # On an accelerator this waits, so it is asked only after a write to gradients.
        written = reached and self._before != self._after
        cleared = (written or in_update) and self._all_zero()
        moved, self._weights = self._moved(), [p._version for p in self._marked]
        return cleared, moved

    def pass_ends(self) -> bool:
        """Return whether the pass reached the model: another model's does not."""
        self._after = self._now()
        return self._after != self._before or self._follow_replaced()

    def set_anew(self) -> bool:
        """Return whether the loop has set other gradients since the last pass, once."""
        before, self._after = self._after, self._now()
        pairs = zip(before, self._after, strict=False)
        return any(now and (not old or now[0] != old[0]) for old, now in pairs)

    def stepped_unseen(self, optimizers: Sequence[Optimizer]) -> bool:
        """Return whether an optimiser has stepped since watching began."""
        stepped = any(one.state for one in optimizers)
        # State alone says little of a step that raised, once gradients were seen.
        return stepped and (self._moved() if self._weights else not self._states)

    def _moved(self) -> bool:
        weights = [p._version for p in self._marked]
        return bool(self._weights) and weights != self._weights

    def _follow_replaced(self) -> bool:
        """Follow other parameters of the model; return whether they have gradients.

        Weights are assigned, not copied, by ``load_state_dict(assign=True)``.
        """
        marked, model = self._marked, self._model()
        if model is not None:
            self.follow(model)
        same = len(marked) == len(self._marked) and all(map(is_, marked, self._marked))
        self._after = self._now()
        return not same and any(self._after)

    def _now(self) -> list[Mark]:
        return [mark_of(p.grad) for p in self._marked]

    def _all_zero(self) -> bool:
        grads = (p.grad for p in self._marked if p.grad is not None)
        return not any(bool(local_part(grad).any()) for grad in grads)


def mark_of(grad: Tensor | None) -> Mark:
    # The version counts writes in place; the identity changes when one is first made.
    return None if grad is None else (id(grad), grad._version)
