"""One operation of a network, seen twice: what it read, and how that moves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operation φ, all it read, and the tangents of what moves."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    moving: tuple[int, ...]
    """Which of the tensors, in reading order, depend on the parameters."""
    tangents: tuple[Tensor, ...]
    """One for each moving tensor."""
    output: int | None = None
    """Which of several results; None when the operation returns one tensor."""

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in leaves([self.args, self.kwargs]) if isinstance(x, Tensor)]

    def tangent(self, x: Tensor | None) -> Tensor | None:
        """Return how an argument moves, or None when it is constant."""
        tensors = self.tensors
        for index, tangent in zip(self.moving, self.tangents, strict=True):
            if tensors[index] is x:
                return tangent
        return None

    def value(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the operation's result with other tensors in the moving places."""
        given = self.tensors
        for index, tensor in zip(self.moving, tensors, strict=True):
            given[index] = tensor
        if writes(self.func):
            given = [tensor.clone() for tensor in given]
        args, kwargs = refilled([self.args, self.kwargs], iter(given))
        result = self.func(*args, **kwargs)
        chosen: Tensor = result if self.output is None else result[self.output]
        return chosen

    def placed(self, found: Sequence[tuple[Tensor | None, Tensor]]) -> "Products":
        """Return products in the order of the moving tensors; others have none."""
        tensors = self.tensors
        products = [torch.zeros_like(tensors[i]) for i in self.moving]
        for place, index in enumerate(self.moving):
            for x, product in found:
                if x is tensors[index]:
                    products[place] = products[place] + product.to(x.dtype)
        return tuple(products)


Products = tuple[Tensor, ...]
"""∇²⟨λ, φ⟩·ż, one tensor for each moving input."""


def writes(func: Callable[..., Any]) -> bool:
    """Say whether a function changes what it reads.

    >>> writes(Tensor.mul_), writes(Tensor.__imul__), writes(Tensor.__mul__)
    (True, True, False)
    """
    name = func.__name__
    return name.startswith("__i") or (name.endswith("_") and not name.startswith("_"))


def leaves(value: Any) -> list[Any]:
    """Return everything in nested tuples, lists and dictionaries, in order."""
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [value]


def refilled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the same nest with its tensors taken from an iterator."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple | list):
        items = [refilled(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: refilled(item, tensors) for key, item in value.items()}
    return value


def twice_differentiated(call: Call, cotangent: Tensor) -> Products:
    """Return ∇²⟨λ, φ⟩·ż by differentiating the operation alone, twice."""
    # Fused attention kernels have no second derivative.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        at = [call.tensors[i].detach().requires_grad_() for i in call.moving]
        inner = (call.value(at) * cotangent).sum()
        slopes = torch.autograd.grad(inner, at, create_graph=True, allow_unused=True)
        moved = sum(
            (slope * tangent).sum()
            for slope, tangent in zip(slopes, call.tangents, strict=True)
            if slope is not None
        )
        return _gradient(moved, at)


def _gradient(moved: Tensor | int, at: list[Tensor]) -> Products:
    if not (isinstance(moved, Tensor) and moved.requires_grad):
        return tuple(torch.zeros_like(x) for x in at)
    found = torch.autograd.grad(moved, at, allow_unused=True)
    return tuple(
        torch.zeros_like(x) if g is None else g for g, x in zip(found, at, strict=True)
    )
