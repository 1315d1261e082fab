"""What every remedy promises: it can be applied, and undone."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import nn

Undo = Callable[[], None]


@runtime_checkable
class Remedy(Protocol):
    """One change to a model. ``apply`` returns the function that takes it back."""

    @property
    def name(self) -> str: ...

    def apply(self, model: nn.Module) -> Undo:
        """Change the model now; calling the result restores it bit for bit."""
        ...
