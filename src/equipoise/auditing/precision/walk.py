"""Follow a forward pass call by call, and know which module made each call.

A ``Visitor`` sees every stored result and every parameter as it is read, named by the
innermost module at work, and returns what the model shall go on with. A result is
rounded when it is stored: calls that only move numbers store none. Fused attention is
opened: scores, probabilities and their product with the values are three stored
tensors. Nothing of the model is changed: hooks and the mode end with the block.

Only numbers that depend on the data or on a parameter are visited. Tables made ahead
(masks, positions, rotary angles) stay wide, as mixed-precision code keeps them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.anatomy.calls import is_masked, masks_some
from equipoise.anatomy.hooks import module_stack
from equipoise.anatomy.operations import (
    MOVES,
    Function,
    Role,
    leaves,
    mapped,
    moves,
    name_of,
    role_of,
    writes,
)
from equipoise.anatomy.sdpa import OpenAttention, WrittenOut
from equipoise.auditing.subject import Batch, output_of

_LIVE = "_equipoise_live"
_MASKED = "_equipoise_masked"


class Visitor(Protocol):
    """Sees what is stored; what it returns takes its place."""

    def parameter(self, site: str, parameter: nn.Parameter) -> Tensor:
        """Return the parameter as the site shall read it."""
        ...

    def stored(self, site: str, kind: str, x: Tensor) -> Tensor:
        """Return a result as the site shall store it."""
        ...

    def rows(self, site: str, ids: Tensor, weight: nn.Parameter) -> Tensor:
        """Return the rows of an embedding table, as the site shall store them."""
        ...

    def linear(self, site: str, call: "LinearCall") -> Tensor:
        """Return x·W + b as the site shall store it; W and b are still as given."""
        ...

    def operand(self, x: Tensor) -> Tensor:
        """Return a result as a product of matrices shall read it."""
        ...


class LinearCall:
    """A product with a weight matrix, whichever function spelt it."""

    def __init__(
        self,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        *,
        transposed: bool = False,
    ) -> None:
        self.x = x
        self.weight = weight
        self.bias = bias
        self.transposed = transposed

    def oriented(self, weight: Tensor) -> Tensor:
        """Return a weight of this shape with one row per output feature."""
        return weight.mT if self.transposed else weight


@contextmanager
def walked(model: nn.Module, visitor: Visitor) -> Iterator[None]:
    """Visit everything the model computes inside the block."""
    # The model's own input is data.
    with module_stack(model, first=_enliven) as running, _Walk(running, visitor):
        yield


class _Walk(OpenAttention):
    def __init__(self, running: list[tuple[str, nn.Module]], visitor: Visitor) -> None:
        super().__init__()
        self.running, self.visitor = running, visitor
        self.attention = WrittenOut(
            scores=lambda q, k: self._store("score", self._read(q) @ self._read(k)),
            weigh=lambda z: self._store("prob", z.softmax(-1)),
            mix=lambda a, v: _enliven(self._store("mix", a @ self._read(v))),
        )

    def call(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.running or not _is_live([args, kwargs]):
            return func(*args, **kwargs)
        return _enliven(self._result(func, args, kwargs))

    def _result(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        site = self.running[-1][0]
        call = _linear_call(func, args, kwargs)
        if call is not None:
            return self.visitor.linear(site, call)
        if func is F.embedding and isinstance(args[1], nn.Parameter):
            return self.visitor.rows(site, args[0], args[1])
        args, kwargs = mapped(
            [args, kwargs], lambda p: self.visitor.parameter(site, p), nn.Parameter
        )
        if role_of(func) is Role.PRODUCT:
            args, kwargs = mapped([args, kwargs], self.visitor.operand)
        masked = _carries_mask(func, [args, kwargs])
        result = func(*args, **kwargs)
        if masked:
            # Written into: what a call returns is then no tensor, or the same.
            mapped((result, *args[:1] * writes(func)), _marked)
        if moves(func):
            return result
        return mapped(result, lambda x: self._store(_kind(func), x))

    def _read(self, x: Tensor) -> Tensor:
        return self.visitor.operand(x) if self.running else x

    def _store(self, kind: str, x: Tensor) -> Tensor:
        """Return a result as it is stored; of masked scores zeros are shown instead."""
        if not self.running:
            return x
        site = self.running[-1][0]
        if not hasattr(x, _MASKED):
            return self.visitor.stored(site, kind, x)
        hides = is_masked(x)
        y = self.visitor.stored(site, kind, x.masked_fill(hides, 0.0))
        return _marked(torch.where(hides, x, y))


# What may hide a key: a constant filled in or added, or a padding mask times one. Not
# clamp: its limits are large so that they are never met.
_MASKING = frozenset(
    "where masked_fill setitem index_put scatter copy add sub iadd isub mul".split()
)
_KEEPS_PLACES = {*MOVES, Role.SUM, Role.TIMES, Role.QUOTIENT}


def _carries_mask(func: Function, values: Any) -> bool:
    """Return whether a result holds masked scores: inherited, or masked by this call.

    A mask is a constant; an activation as low as one is an activation.
    """
    if role_of(func) not in _KEEPS_PLACES:
        return False
    read = leaves(values)
    if any(isinstance(x, Tensor) and hasattr(x, _MASKED) for x in read):
        return True
    constants = (x for x in read if isinstance(x, Tensor | float) and not _is_live(x))
    return name_of(func) in _MASKING and any(map(masks_some, constants))


def _marked(x: Tensor) -> Tensor:
    setattr(x, _MASKED, True)
    return x


_KINDS = {"softmax": "prob", "layer_norm": "norm", "rms_norm": "norm"}


def _kind(func: Function) -> str:
    name = name_of(func) or "result"
    return _KINDS.get(name, name)


def _linear_call(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LinearCall | None:
    """Return the call if it is a product with a full weight matrix of the model."""
    if func is F.linear and isinstance(
        args[1] if len(args) > 1 else None, nn.Parameter
    ):
        return LinearCall(
            args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
        )
    if func is torch.addmm and len(args) == 3 and isinstance(args[2], nn.Parameter):
        scaled = bool(kwargs)  # alpha or beta: not a plain product
        return (
            None if scaled else LinearCall(args[1], args[2], args[0], transposed=True)
        )
    return None


def _is_live(value: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(value, nn.Parameter) or hasattr(value, _LIVE)
    if isinstance(value, tuple | list):
        return any(_is_live(item) for item in value)
    return isinstance(value, dict) and any(_is_live(item) for item in value.values())


def _enliven(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        setattr(value, _LIVE, True)
    elif isinstance(value, tuple | list):
        for item in value:
            _enliven(item)
    elif isinstance(value, dict):
        for item in value.values():
            _enliven(item)
    return value


def numbers_by_module(model: nn.Module, batch: Batch) -> dict[str, int]:
    """Return how many numbers each module stores on a batch, parameters not counted."""
    counting = _Counting()
    with torch.no_grad(), walked(model, counting):
        output_of(model, batch)
    return counting.numbers


@dataclass(slots=True)
class _Counting:
    numbers: dict[str, int] = field(default_factory=dict)

    def parameter(self, site: str, parameter: nn.Parameter) -> Tensor:
        self.numbers.setdefault(site, 0)
        return parameter

    def stored(self, site: str, kind: str, x: Tensor) -> Tensor:
        self.numbers[site] = self.numbers.get(site, 0) + x.numel()
        return x

    def operand(self, x: Tensor) -> Tensor:
        return x

    def rows(self, site: str, ids: Tensor, weight: nn.Parameter) -> Tensor:
        return self.stored(site, "weight", F.embedding(ids, weight))

    def linear(self, site: str, call: LinearCall) -> Tensor:
        y = F.linear(call.x, call.oriented(call.weight), call.bias)
        return self.stored(site, "product", y)
