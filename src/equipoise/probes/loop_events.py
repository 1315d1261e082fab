"""Events of the training loop that facts are counted from, at every step.

They carry no tensor but what the loop itself just made. Who takes them counts, and
touches numbers only in a sampled step.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer


class AnyBackward(NamedTuple):
    """A backward pass is about to begin, of whatever model."""


class AnyUpdate(NamedTuple):
    """An optimiser is about to step, of whatever model."""

    optimizer: Optimizer


class GradientsClipped(NamedTuple):
    """Gradients are about to be clipped by their norm."""

    parameters: Sequence[Tensor] | None
    """None if they are neither a list nor a tuple."""
    largest: float
    """The norm above which they are scaled down."""
    norm: Tensor
    """The norm that they are taken to have."""
    given: bool
    """Whether the loop handed in that norm; torch made it of the same gradients if not.
    """


class LossScaled(NamedTuple):
    """A gradient scaler has multiplied a loss."""

    scaler: Any


class ScheduleMoves(NamedTuple):
    """A schedule is about to set its optimiser's rates."""

    schedule: Any
    initial: bool
    """Whether its construction moves it."""


LoopEvent = AnyBackward | AnyUpdate | GradientsClipped | LossScaled | ScheduleMoves


@runtime_checkable
class LoopProbe(Protocol):
    """A probe that counts what the loop does, at every step, sampled or not."""

    @property
    def name(self) -> str: ...

    def on_loop(self, event: LoopEvent) -> None: ...


@runtime_checkable
class SampleEndProbe(Protocol):
    """A probe that stops reading when the sampled step is over."""

    @property
    def name(self) -> str: ...

    def end_sample(self) -> None: ...
