"""How a probe hands over what it measured."""

from typing import Literal, Protocol

from torch import Tensor

How = Literal["mean", "max", "min", "sum", "norm", "last"]
"""How values of several ranks, or of several calls in a step, become one.

``norm``: the ranks hold parts of one vector, whose norm is √Σ‖part‖²; of several calls
the last counts, because it saw the sum.
"""


class Emit(Protocol):
    """Takes small, detached tensors, still on the device."""

    def __call__(
        self, site: str, quantity: str, values: Tensor, *, how: How = "last"
    ) -> None: ...
