"""Follow a forward pass call by call, and know which module made each call.

A ``Visitor`` sees every stored result and every parameter as it is read, named by the
innermost module at work, and returns what the model shall go on with. Nothing of the
model is changed: hooks and the mode live inside an ``ExitStack`` and leave with it.

Only numbers that depend on the data or on a parameter are visited. Tables made ahead
(masks, positions, rotary angles) stay wide, as mixed-precision code keeps them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from equipoise.precision.multihead import multihead
from equipoise.precision.operations import moves, opened_attention

_LIVE = "_equipoise_live"


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
    stack: list[str] = []
    with ExitStack() as exits:
        for name, module in model.named_modules():
            enter, leave = _steps(stack, name)
            for handle in (
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, always_call=True),
            ):
                exits.callback(handle.remove)
        exits.enter_context(_Walk(stack, visitor))
        yield


def _steps(stack: list[str], name: str) -> tuple[Any, Any]:
    def enter(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not stack:  # the model's own input is data
            _enliven([args, dict(kwargs)])
        stack.append(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    return enter, leave


class _Walk(TorchFunctionMode):
    def __init__(self, stack: list[str], visitor: Visitor) -> None:
        super().__init__()
        self.stack, self.visitor = stack, visitor

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.stack:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return multihead(*args, **kwargs)
        if not _is_live([args, kwargs]):
            return func(*args, **kwargs)
        return _enliven(self._result(func, args, kwargs))

    def _result(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        site = self.stack[-1]
        call = _linear_call(func, args, kwargs)
        if call is not None:
            return self.visitor.linear(site, call)
        if func is F.scaled_dot_product_attention:
            return opened_attention(self._store(site), *args, **kwargs)
        if func is F.embedding and isinstance(args[1], nn.Parameter):
            return self.visitor.rows(site, args[0], args[1])
        args, kwargs = _replaced(
            [args, kwargs], lambda p: self.visitor.parameter(site, p)
        )
        result = func(*args, **kwargs)
        if moves(func):
            return result
        return _mapped(result, lambda x: self.visitor.stored(site, _kind(func), x))

    def _store(self, site: str) -> Callable[[str, Tensor], Tensor]:
        return lambda kind, x: self.visitor.stored(site, kind, x)


_KINDS = {"softmax": "prob", "layer_norm": "norm", "rms_norm": "norm"}


def _kind(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "result").strip("_")
    return _KINDS.get(name, name)


def _linear_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LinearCall | None:
    """Return the call if it is a product with a whole weight matrix of the model."""
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


def _mapped(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(result, Tensor):
        return change(result) if result.is_floating_point() else result
    if isinstance(result, tuple | list) and not hasattr(result, "_fields"):
        return type(result)(_mapped(item, change) for item in result)
    return result


def _replaced(value: Any, change: Callable[[nn.Parameter], Tensor]) -> Any:
    if isinstance(value, nn.Parameter):
        return change(value) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_replaced(item, change) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, change) for key, item in value.items()}
    return value


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
