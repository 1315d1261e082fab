"""Finds attention by what a model calls, not by what its classes are named."""

import weakref
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from equipoise.anatomy.callers import calling_module
from equipoise.anatomy.calls import AttentionCall

Listener = Callable[[AttentionCall], None]

SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax}
# What eager attention does to its weights before it mixes values with them.
PASSES_WEIGHTS_ON = {F.dropout, torch.dropout, Tensor.to, Tensor.type_as, Tensor.float}
PASSES_WEIGHTS_ON |= {Tensor.half, Tensor.bfloat16, Tensor.view, Tensor.reshape}
MIXES = {torch.matmul, torch.bmm, torch.einsum, Tensor.matmul, Tensor.bmm}
MIXES |= {Tensor.__matmul__, torch.baddbmm}


@dataclass(frozen=True, slots=True)
class _Pending:
    """Softmax weights that become attention once they mix values."""

    call: AttentionCall
    weights: "weakref.ref[Tensor]"


class Interceptor(TorchFunctionMode):
    """While active, hands every attention call to a listener after it has run.

    A softmax is attention only if its weights go on to mix values in a product: a
    router's softmax, or the one over the vocabulary, never does.
    """

    def __init__(self, known: Container[int], listener: Listener) -> None:
        super().__init__()
        self._known = known
        self._listener = listener
        self._pending: dict[int, _Pending] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._listener(self._sdpa(*args, **kwargs))
        elif func in SOFTMAXES:
            self._remember(out, args, kwargs)
        elif self._pending and func in PASSES_WEIGHTS_ON:
            self._pass_on(out, args)
        elif self._pending and func in MIXES:
            self._confirm(args)
        return out

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> AttentionCall:
        return AttentionCall(
            module=calling_module(self._known),
            kind="sdpa",
            q_BHQD=_four(query),
            k_BGKD=_four(key),
            v_BGKD=_four(value),
            mask=attn_mask,
            causal=is_causal,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
        )

    def _remember(self, out: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        scores = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if scores.ndim < 3 or dim not in (-1, scores.ndim - 1):
            return
        call = AttentionCall(
            module=calling_module(self._known),
            kind="softmax",
            scores_BHQK=_four(scores),
        )
        self._pending[id(out)] = _Pending(call, weakref.ref(out))

    def _taken(self, args: tuple[Any, ...]) -> Iterator[_Pending]:
        """Yield the pending weights among the arguments, and forget them."""
        for argument in _flat(args):
            pending = self._pending.get(id(argument))
            if pending is not None and pending.weights() is argument:
                yield self._pending.pop(id(argument))

    def _pass_on(self, out: Any, args: tuple[Any, ...]) -> None:
        for pending in self._taken(args):
            self._pending[id(out)] = _Pending(pending.call, weakref.ref(out))

    def _confirm(self, args: tuple[Any, ...]) -> None:
        for pending in self._taken(args):
            self._listener(pending.call)


def _flat(args: Any) -> Iterator[Any]:
    for argument in args:
        if isinstance(argument, tuple | list):
            yield from _flat(argument)
        else:
            yield argument


def _four(x: Tensor) -> Tensor:
    """Return x as (B, H, Q, K): no head axis is one head, two (grouped) are one."""
    while x.ndim < 4:
        x = x.unsqueeze(0 if x.ndim < 3 else 1)
    return x.flatten(1, x.ndim - 3) if x.ndim > 4 else x
