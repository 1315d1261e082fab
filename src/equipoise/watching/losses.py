"""Which of the losses that pass by belong to the watched model."""

from collections import deque

from torch import Tensor, nn

MARKS = 16
"""Parameters looked at to tell whether a backward pass reached the model."""


class Losses:
    """Collects a step's losses; another model's (a teacher's, a rival's) do not count.

    A backward pass that changed the gradient of no parameter we look at is not ours.
    Where none seems ours (all the marked parameters unused), all count.
    """

    def __init__(self, model: nn.Module) -> None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        stride = max(1, len(trainable) // MARKS)
        self._marked = trainable[::stride]
        self._before: list[object] = []
        self.ever_ours = False
        self.fresh_starts = 0
        """How often gradients were cleared since the step began."""
        self._own: list[Tensor] = []
        self._others: deque[Tensor] = deque(maxlen=MARKS)

    @property
    def ours(self) -> bool:
        """Whether a backward pass of this step reached the model."""
        return bool(self._own)

    def before_backward(self) -> None:
        self._before = self._state()
        if self._own and self._before and not any(self._before):
            self.fresh_starts += 1

    def after_backward(self, loss: Tensor) -> bool:
        """Keep a loss, and return whether it is the model's own."""
        mine = self._state() != self._before
        self.ever_ours = self.ever_ours or mine
        (self._own if mine else self._others).append(loss)
        return mine

    def taken(self) -> Tensor | None:
        """Return the step's objective, the sum over its micro-batches."""
        heard = self._own or list(self._others)
        self._own, self.fresh_starts = [], 0
        self._others.clear()
        if not heard:
            return None
        total = heard[0]
        for loss in heard[1:]:
            total = total + loss.to(total.device)
        return total

    def _state(self) -> list[object]:
        return [_mark(p.grad) for p in self._marked]


def _mark(grad: Tensor | None) -> tuple[int, int] | None:
    # The version counts writes in place; the identity changes when one is first made.
    return None if grad is None else (id(grad), grad._version)
