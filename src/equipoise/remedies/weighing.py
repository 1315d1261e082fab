"""Puts other weights in the place of softmax, inside one module's forward only.

Axes, in this file:  B batch · H head · Q query · K key · D head channel.
"""

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from equipoise.anatomy.calls import HIDDEN
from equipoise.anatomy.operations import SOFTMAXES
from equipoise.anatomy.written_out import WrittenOut

Weigh = Callable[[Tensor], Tensor]
LOGARITHMS = {F.log_softmax, torch.log_softmax, Tensor.log_softmax}


class Weighing(TorchFunctionMode):
    """While active, softmax over the last axis and fused attention use ``weigh``.

    Everything else of the model stays its own: scale, soft-cap, position bias, mask,
    dropout. Fused attention is written out, so it costs memory for its scores.
    """

    def __init__(self, weigh: Weigh) -> None:
        super().__init__()
        self.weigh = weigh
        self.heard = 0
        self.attention = WrittenOut(weigh=self.softmax)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in SOFTMAXES - LOGARITHMS and _over_keys(*args, **kwargs):
            return self.softmax(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.multi_head(*args, **kwargs)
        return func(*args, **kwargs)

    def softmax(
        self, input: Tensor, dim: int | None = None, *more: Any, **options: Any
    ) -> Tensor:
        """Return the weights of scores whose hidden keys may be large and negative."""
        self.heard += 1
        dtype = next((x for x in more if isinstance(x, torch.dtype)), None)
        z = input.to(options.get("dtype") or dtype or input.dtype)
        return self.weigh(z.masked_fill(z <= HIDDEN, -math.inf))

    def multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """Run torch's own Python function, with our softmax and attention in it.

        A copy with other names bound: torch's function asks whether a mode is active
        and would call us for ever, and its module must not be changed for others.
        """
        function: Any = F.multi_head_attention_forward
        names = {
            **function.__globals__,
            "has_torch_function": lambda tensors: False,
            "softmax": self.softmax,
            "scaled_dot_product_attention": self.attention,
        }
        ours = FunctionType(function.__code__, names, argdefs=function.__defaults__)
        return ours(*args, **kwargs)


def _over_keys(
    input: Tensor, dim: int | None = None, *more: Any, **options: Any
) -> bool:
    """Return whether a softmax looks like attention's: last axis, rows of queries."""
    return dim in (-1, input.ndim - 1) and input.ndim >= 3
