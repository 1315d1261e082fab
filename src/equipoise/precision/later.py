"""A product with a vocabulary that is made when, and as far as, somebody looks at it.

Axes, in this file: N tokens · K input features · M output features · m some of them.

A model's head is a third of GPT-2's forward pass, and a prediction reads a few of its
columns only. A ``Later`` has the product's shape, dtype and device; any other question
put to it by way of torch makes the whole product first, once. What goes round torch's
dispatch (a hand-written ``autograd.Function``) reads NaN, never a number.
"""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

_SHAPE = frozenset(
    {
        Tensor.shape.__get__,  # type: ignore[attr-defined]
        Tensor.dtype.__get__,  # type: ignore[attr-defined]
        Tensor.device.__get__,
        Tensor.ndim.__get__,  # type: ignore[attr-defined]
        Tensor.dim,
        Tensor.size,
        Tensor.numel,
        Tensor.is_floating_point,
    }
)


class Later(Tensor):
    """x·Wᵀ + b, not made yet.

    >>> x, w = torch.ones(2, 3), torch.eye(4, 3)
    >>> y = Later.of(x, 4, made=lambda: x @ w.mT, some=lambda m: x @ w[m].mT)
    >>> y.shape, y.is_made, y.some(torch.tensor([3])).tolist()
    (torch.Size([2, 4]), False, [[0.0], [0.0]])
    >>> float((y + 1).sum()), y.is_made
    (14.0, True)
    """

    _make: Callable[[], Tensor]
    _whole: Tensor | None
    some: Callable[[Tensor], Tensor]
    """Features, by index → the product with those alone."""

    @classmethod
    def of(
        cls,
        x: Tensor,
        features: int,
        *,
        made: Callable[[], Tensor],
        some: Callable[[Tensor], Tensor],
    ) -> Self:
        """Return the promise of x's product with so many features."""
        shape = (*x.shape[:-1], features)
        nothing = torch.full((), math.nan, dtype=x.dtype, device=x.device)
        promise: Self = nothing.expand(shape).as_subclass(cls)
        promise._make, promise._whole, promise.some = made, None, some
        return promise

    @property
    def is_made(self) -> bool:
        return self._whole is not None

    @property
    def whole(self) -> Tensor:
        """Return the product itself."""
        if self._whole is None:
            with torch.enable_grad():  # a model may ask under no_grad first
                self._whole = self._make()
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_made(args), **_made(kwargs or {}))


def _made(value: Any) -> Any:
    if isinstance(value, Later):
        return value.whole
    if isinstance(value, tuple | list):
        return type(value)(_made(item) for item in value)
    if isinstance(value, dict):
        return {key: _made(item) for key, item in value.items()}
    return value
