"""Finds attention by what a model calls, not by what its classes are named."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from equipoise.anatomy import multihead
from equipoise.anatomy.call_stack import Caller, caller, sounds_like_attention
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.fused_kernels import (
    Given,
    NotReadError,
    is_known,
    kernel_call,
    operator_arguments,
)
from equipoise.anatomy.hooks import inside_torch_func, is_active, pop_mode
from equipoise.anatomy.kernel_functions import (
    KernelFunctions,
    Reader,
    flex_call,
    flex_intercepted,
)
from equipoise.anatomy.multihead import FastPaths
from equipoise.anatomy.operations import (
    EINSUM,
    FUSED,
    PRODUCTS,
    SOFTMAXES,
    Function,
    foreign_kernel,
)
from equipoise.anatomy.sdpa import FusedArguments, is_nested, padded, sdpa_call
from equipoise.anatomy.sharding import local_part, sharded_axes
from equipoise.anatomy.sites import Anatomy, Gaps, Reason
from equipoise.anatomy.softmax_flow import (
    CONVOLUTION,
    LOST,
    DeclaredWeights,
    SoftmaxFlow,
)

Listener = Callable[[AttentionCall], None]
Hook = Callable[..., None]
Watched = Mapping[Function, Hook]
"""Other functions of torch, and what is called after each of their calls."""
ENTRY_POINTS = {
    *SOFTMAXES,
    *FUSED,
    F.multi_head_attention_forward,
}


SPLIT_ROWS = Reason("split_rows")


TRANSFORMED = Reason("torch_func")


def _as_it_is(hook: Hook) -> Hook:
    return hook


class Interceptor(TorchFunctionMode):
    """While active, hands every attention call to a listener after it has run.

    ``guarded`` wraps what we do between the model's calls, so that a mistake of ours
    stays ours. What is seen but cannot be read goes to ``gaps``, by name.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        listener: Listener,
        *,
        guarded: Any = _as_it_is,
        gaps: Gaps | None = None,
        watched: Watched = MappingProxyType({}),
        askew: Listener | None = None,
    ) -> None:
        super().__init__()
        self._anatomy = anatomy
        self.gaps = Gaps() if gaps is None else gaps
        self._sites = {id(site.module) for site in anatomy.attention}
        self._listener_of_calls, self._read = listener, 0
        self._flow = SoftmaxFlow(self._listener, self._miss, askew)
        self._watched, self._operation = watched, guarded(self._operated)
        others = {id(s.module) for s in anatomy.attention if s.weights != "softmax"}
        self._declared = DeclaredWeights(others, self._listener)
        self._notice = guarded(self._look)
        self._finish_closing = guarded(self._flow.finish_closing)
        self._report_flex = guarded(self._flex)
        self._fast = FastPaths(self, anatomy, self._listener, guarded=guarded)
        self._kernels = KernelFunctions(
            self, anatomy, count=lambda: self._read, report=guarded(self._kernel)
        )
        self._around, self._over = ExitStack(), False

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._around.enter_context(self._fast.installed())
        self._around.enter_context(flex_intercepted(self, self._report_flex))
        self._around.enter_context(self._kernels.installed())
        return self

    def __exit__(self, *raised: object) -> None:
        self._around.close()
        self._finish_closing()
        for who in self._flow.lost():
            if id(who.module) in self._sites or sounds_like_attention(who.module):
                self._miss(who, LOST)
        self._flow.clear()
        self._over = True
        self.leave_stack()

    def leave_stack(self) -> None:
        """Leave the stack of modes once it is over, if torch has put it there.

        Within its own ``__torch_function__`` (``loss.backward()`` is called in there) a
        mode is off the stack, and torch puts it back afterwards.
        """
        if self._over and is_active(self):
            pop_mode(self)

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._over:
            return out
        foreign = isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
        if inside_torch_func():
            if func in ENTRY_POINTS:
                self._miss(self._caller(), TRANSFORMED)
        elif func in ENTRY_POINTS or self._flow or foreign or self._declared:
            self._notice(func, args, kwargs, out)
        if func in self._watched and not inside_torch_func():
            self._operation(func, (*args, *kwargs.values()))
        return out

    def _operated(self, func: Function, args: Any) -> None:
        self._watched[func](self._caller(), func, args)

    def _look(self, func: Function, args: Any, kwargs: Any, out: Any) -> None:
        if func in FUSED:
            self._sdpa(args, kwargs)
        elif func is F.multi_head_attention_forward:
            self._listener(multihead.from_function(self._caller(), args, kwargs))
        elif func in SOFTMAXES:
            self._flow.start(self._caller(), out, _softmax_given(*args, **kwargs))
        elif kernel := foreign_kernel(func):
            self._operator(kernel, func, args, kwargs)
        else:
            if self._declared and (func in PRODUCTS or func is EINSUM):
                self._declared.follow(self._caller(), func, args, out)
            if self._flow:
                self._flow.follow(func, args, out, kwargs)

    def _listener(self, call: AttentionCall) -> None:
        self._read += 1
        self._listener_of_calls(call)

    def _operator(self, name: str, func: Function, args: Any, kwargs: Any) -> None:
        """Read a kernel's operator; one that is not known may be wrapped further out.

        A kernel that keeps its arguments to itself is named as not read.
        """
        if is_known(func):
            given = operator_arguments(func, args, kwargs)
            self._kernel(name, kernel_call, given)
        elif not self._kernels.inside:
            self._miss(self._caller(), Reason("no_scores", kernel=name))

    def _kernel(self, name: str, reader: Reader, given: Given) -> None:
        who = self._caller()
        try:
            self._listener(reader(who, given))
        except NotReadError as why:
            self._miss(who, Reason("kernel_call", kernel=name, detail=str(why)))

    def _sdpa(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_nested(args, kwargs):
            args, kwargs = (), padded(args, kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if any(sharded_axes(x) - {0, 1} for x in tensors):
            self._miss(self._caller(), SPLIT_ROWS)
            return
        here = {name: _here(x) for name, x in kwargs.items()}
        given = FusedArguments(*map(_here, args), **here)
        self._listener(sdpa_call(self._caller(), given))

    def _flex(self, given: dict[str, Any]) -> None:
        self._listener(flex_call(self._caller(), given))

    def _caller(self) -> Caller:
        return caller(self._anatomy.names, self._sites)

    def _miss(self, who: Caller, reason: Reason) -> None:
        if reason == CONVOLUTION:  # a module that convolves may attend as well
            self.gaps.add_partial(who.name, reason)
        else:
            self.gaps.unread.setdefault(who.name, reason)


def _here(x: Any) -> Any:
    return local_part(x) if isinstance(x, Tensor) else x


def _softmax_given(
    input: Tensor, dim: int | None = None, *more: Any, **others: Any
) -> tuple[Tensor, int | None]:
    return input, dim
