"""A product with a vocabulary, computed when it is read and only as far as it is read.

Axes, in this file: N tokens · K input features · M output features · m some of them.

A model's head is a third of GPT-2's forward pass, and a prediction reads a few of its
columns only. A ``LazyProduct`` has the product's shape, dtype and device; any other
call of torch on it computes the full product first, once. What goes round torch's
dispatch (a hand-written ``autograd.Function``) reads NaN, never a number.

A probe on some of a vocabulary's logits leaves most columns of the head's gradient
zero; ``sparse_product`` leaves them out of the backward pass, and the product back to
the hidden states costs m/M of the dense one.
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


class LazyProduct(Tensor):
    """x·Wᵀ + b, not computed yet.

    >>> x, w = torch.ones(2, 3), torch.eye(4, 3)
    >>> y = LazyProduct.of(x, 4, made=lambda: x @ w.mT, some=lambda m: x @ w[m].mT)
    >>> y.shape, y.is_made, y.some(torch.tensor([3])).tolist()
    (torch.Size([2, 4]), False, [[0.0], [0.0]])
    >>> float((y + 1).sum()), y.is_made
    (14.0, True)
    """

    _make: Callable[[], Tensor]
    _full: Tensor | None
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
        """Return x's product with so many features, to be computed when read."""
        shape = (*x.shape[:-1], features)
        nothing = torch.full((), math.nan, dtype=x.dtype, device=x.device)
        product: Self = nothing.expand(shape).as_subclass(cls)
        product._make, product._full, product.some = made, None, some
        return product

    @property
    def is_made(self) -> bool:
        return self._full is not None

    @property
    def full(self) -> Tensor:
        """Return the product itself."""
        if self._full is None:
            with torch.enable_grad():  # a model may read it under no_grad first
                self._full = self._make()
        return self._full

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_made(args), **_made(kwargs or {}))


def _made(value: Any) -> Any:
    if isinstance(value, LazyProduct):
        return value.full
    if isinstance(value, tuple | list):
        return type(value)(_made(item) for item in value)
    if isinstance(value, dict):
        return {key: _made(item) for key, item in value.items()}
    return value


WIDE = 4096
"""Output features beyond which looking for those without a gradient pays."""

OnGradient = Callable[[Tensor, Tensor, Tensor], None]
"""Takes (gradient of the live features, their indices, their rows of W)."""


def sparse_product(
    x: Tensor, weight_MK: Tensor, bias_M: Tensor | None, *, on_gradient: OnGradient
) -> Tensor:
    """Return x·Wᵀ + b; a gradient goes to ``on_gradient`` and to x only."""
    y: Tensor = _Product.apply(x, weight_MK, bias_M, on_gradient)  # type: ignore[no-untyped-call]
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_MK: Tensor,
        bias_M: Tensor | None,
        on_gradient: OnGradient,
    ) -> Tensor:
        ctx.save_for_backward(weight_MK)
        ctx.on_gradient = on_gradient
        # No view of a flat product: the model may go on in place.
        y = x.new_empty((*x.shape[:-1], len(weight_MK)))
        y_NM, x_NK = y.view(-1, len(weight_MK)), x.reshape(-1, x.shape[-1])
        torch.mm(x_NK, weight_MK.mT, out=y_NM)
        return y if bias_M is None else y.add_(bias_M)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (weight_MK,) = ctx.saved_tensors
        live_m = _live(g.flatten(0, -2))
        g_xm, weight_mK = g, weight_MK
        if len(live_m) < g.shape[-1]:
            g_xm = g.index_select(-1, live_m)
            weight_mK = weight_MK.index_select(0, live_m)
        ctx.on_gradient(g_xm, live_m, weight_mK)
        return g_xm @ weight_mK, None, None, None


def _live(g_NM: Tensor) -> Tensor:
    """Return the features that carry the gradient; all of them when in doubt.

    Those of the largest row are a guess; they are all when they hold the full norm.
    """
    every = torch.arange(g_NM.shape[1], device=g_NM.device)
    norm_N = torch.linalg.vector_norm(g_NM, dim=1)
    guess_m = (g_NM[int(norm_N.argmax())] != 0).nonzero().squeeze(1)
    if 2 * len(guess_m) > len(every):
        return every
    held = float(g_NM.index_select(1, guess_m).double().square().sum())
    total = float(norm_N.double().square().sum())
    return guess_m if abs(held - total) <= 1e-6 * total else every
