"""Each operation of a forward pass that bends: what it read, and how that moves.

Parameters carry tangents (forward-mode differentiation), so that every operation reads
numbers together with their tangents. Fused attention is opened into three operations.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from equipoise.anatomy.hooks import module_stack
from equipoise.anatomy.operations import (
    Function,
    bends,
    kind_of,
    leaves,
    linear_in_one,
    writes,
)
from equipoise.anatomy.sdpa import OpenAttention, WrittenOut


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCall:
    """An operation φ, all it read, and the tangents of what moves."""

    func: Function
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


def refilled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the same nest with tensors from an iterator."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple | list):
        items = [refilled(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: refilled(item, tensors) for key, item in value.items()}
    return value


def twice_differentiated(call: OperationCall, cotangent: Tensor) -> Products:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation, and the module it is in."""

    site: str
    kind: str
    call: OperationCall
    index: int
    """How many came before it in the pass."""


Report = Callable[[Node, Tensor], None]
"""Takes a node and its result, on the way forward."""


@contextmanager
def observed(model: nn.Module, report: Report) -> Iterator[None]:
    """Report each operation of the block that reads something moving and can bend."""
    with module_stack(model) as running, _Nodes(running, report):
        yield


def _purpose(module: nn.Module) -> str:
    """Return what a module is made for, where its operations alone do not show it."""
    name = type(module).__name__
    if name.endswith("Norm"):
        return "norm"
    return "activation" if re.search("Activation|GELU|SiLU", name) else ""


class _Nodes(OpenAttention):
    def __init__(self, running: list[tuple[str, nn.Module]], report: Report) -> None:
        super().__init__()
        self.running, self.report, self.count = running, report, 0
        self.attention = WrittenOut(
            scores=lambda q, k: self.result(torch.matmul, (q, k), {}, "scores"),
            weigh=lambda z: self.result(torch.softmax, (z, -1), {}, "softmax"),
            mix=lambda a, v: self.result(torch.matmul, (a, v), {}, "mix"),
        )

    def call(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func is F.mse_loss:
            return self._squared_error(*args, **kwargs)
        return self.result(func, args, kwargs)

    def result(
        self,
        func: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kind: str = "",
    ) -> Any:
        """Return what the operation returns, reporting it if it can bend."""
        call = _moved(func, args, kwargs) if bends(func) else None
        result = func(*args, **kwargs)
        if call is not None:
            self._meet(call, kind or kind_of(func), result)
        return result

    def _meet(self, call: OperationCall, kind: str, result: Any) -> None:
        several = isinstance(result, tuple | list)
        for index, part in enumerate(result if several else [result]):
            if isinstance(part, Tensor) and part.is_floating_point():
                call = replace(call, output=index if several else None)
                self.report(self._node(kind, call), part)

    def _node(self, kind: str, call: OperationCall) -> Node:
        site, module = self.running[-1] if self.running else ("", None)
        purpose = "" if module is None else _purpose(module)
        index, self.count = self.count, self.count + 1
        return Node(site=site, kind=purpose or kind, call=call, index=index)

    def _squared_error(
        self,
        input: Tensor,
        target: Tensor,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss in plain operations: torch's kernel has no dual backward."""
        off: Tensor = self.result(torch.square, (input - target,), {}, "loss")
        off = off if weight is None else off * weight
        if reduction == "none":
            return off
        total: Tensor = off.sum()
        parts = off.numel() if weight is None else weight.expand_as(off).sum()
        return total if reduction == "sum" else total / parts


def _moved(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OperationCall | None:
    """Return the call on plain copies of what it read, if any of that moves."""
    tensors = [x for x in leaves([args, kwargs]) if isinstance(x, Tensor)]
    duals = [forward_ad.unpack_dual(x) for x in tensors]
    moving = tuple(i for i, dual in enumerate(duals) if dual.tangent is not None)
    if not moving or (len(moving) == 1 and linear_in_one(func, moving[0])):
        return None
    plain = [dual.primal.detach() for dual in duals]
    tangents = [duals[i].tangent.detach() for i in moving]
    if writes(func):
        plain, tangents = ([x.clone() for x in xs] for xs in (plain, tangents))
    given = refilled([args, kwargs], iter(plain))
    return OperationCall(
        func=func,
        args=tuple(given[0]),
        kwargs=given[1],
        moving=moving,
        tangents=tuple(tangents),
    )
