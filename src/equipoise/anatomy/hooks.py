"""Hooks and torch-function modes that leave no mark on the model they observe.

``nn.TransformerEncoderLayer`` gives up its fused path, and with it the model's bits,
as soon as any module inside it carries a forward hook of its own. It does not look at
torch's global hooks; so ours are global, one for all, and exist only while something
is connected. A hook sees the calls of the thread that connected it: another thread may
be evaluating the same model. A mode can be taken off the stack for a while, and is put
back where it was.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.hooks import RemovableHandle

Before = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]
After = Callable[..., None]
"""Takes (module, args, output), or (module, args, kwargs, output) if it asks to."""


class _GlobalHook:
    """One global hook that gives each module's calls to the hooks connected to it."""

    def __init__(self, register: Callable[[After], RemovableHandle]) -> None:
        self._register = register
        self._hooks: dict[int, OrderedDict[int, After]] = {}
        self._torch: RemovableHandle | None = None

    def connect(self, module: nn.Module, hook: After) -> RemovableHandle:
        # A compiled wrapper shares its hooks with the module it wraps; so do we.
        module = getattr(module, "_orig_mod", module)
        if self._torch is None:
            self._torch = self._register(self._called)
        # torch asks the module whether a pre-hook wants keyword arguments.
        module._forward_pre_hooks_with_kwargs[self._torch.id] = True
        mine = self._hooks.setdefault(id(module), OrderedDict())
        handle = _Handle(mine, lambda: self._disconnected(module))
        mine[handle.id] = _in_this_thread(hook)
        return handle

    def _called(self, module: nn.Module, *given: Any) -> None:
        for hook in tuple(self._hooks.get(id(module), OrderedDict()).values()):
            hook(module, *given)

    def _disconnected(self, module: nn.Module) -> None:
        if self._torch is None or self._hooks.get(id(module)):
            return
        self._hooks.pop(id(module), None)
        module._forward_pre_hooks_with_kwargs.pop(self._torch.id, None)
        if not self._hooks:
            self._torch.remove()
            # torch's own handle forgets this one, and the dictionary would grow.
            torch_modules._global_forward_hooks_with_kwargs.pop(self._torch.id, None)
            self._torch = None


def _in_this_thread(hook: After) -> After:
    here = threading.get_ident()

    def call(*given: Any) -> None:
        if threading.get_ident() == here:
            hook(*given)

    return call


class _Handle(RemovableHandle):
    """Disconnects one hook; the last one removes torch's global hook."""

    def __init__(
        self, mine: OrderedDict[int, After], removed: Callable[[], None]
    ) -> None:
        super().__init__(mine)
        self._mine, self._removed = mine, removed

    def remove(self) -> None:
        self._mine.pop(self.id, None)
        self._removed()


_BEFORE = _GlobalHook(torch_modules.register_module_forward_pre_hook)
_AFTER = _GlobalHook(
    lambda hook: torch_modules.register_module_forward_hook(
        hook, with_kwargs=True, always_call=True
    )
)


def before(module: nn.Module, hook: Before) -> RemovableHandle:
    """Call ``hook(module, args, kwargs)`` before the module runs.

    Example:
        >>> seen, layer = [], nn.Identity()
        >>> handle = before(layer, lambda m, args, kwargs: seen.append(args))
        >>> layer(1), nn.Identity()(2), len(layer._forward_pre_hooks)
        (1, 2, 0)
        >>> handle.remove(); layer(3), seen
        (3, [(1,)])
    """

    def call(module: nn.Module, args: Any, kwargs: Any = None) -> None:
        hook(module, args, kwargs or {})

    return _BEFORE.connect(module, call)


def after(
    module: nn.Module,
    hook: After,
    *,
    with_kwargs: bool = False,
    always_call: bool = False,
) -> RemovableHandle:
    """Call ``hook(module, args, output)`` after the module has run.

    ``always_call`` calls it even if the module raised, with None for the output.
    """

    def call(module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        *kwargs, output = kwargs_and_output  # torch gives no kwargs after an exception
        if output is not None or always_call:
            hook(module, args, *((*kwargs, {})[:1] if with_kwargs else ()), output)

    return _AFTER.connect(module, call)


@contextmanager
def module_stack(
    model: nn.Module, *, first: Callable[[Any], None] | None = None
) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the modules of a model that are running, outermost first, with their names.

    ``first`` is called with the arguments of a module that nothing of the model called.
    """
    running: list[tuple[str, nn.Module]] = []

    def connect(name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        def enter(_: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            if first is not None and not running:
                first([args, dict(kwargs)])
            running.append((name, module))

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            running.pop()

        yield before(module, enter)
        yield after(module, leave, always_call=True)

    with ExitStack() as exits:
        for name, module in model.named_modules():
            for handle in connect(name, module):
                exits.callback(handle.remove)
        yield running


def is_active(mode: TorchFunctionMode) -> bool:
    """Return whether a mode is active: each thread has a stack of its own."""
    return any(mode is other for other in _get_current_function_mode_stack())


def inside_torch_func() -> bool:
    """Return whether ``torch.func`` is running: its tensors hold no numbers to read."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def pop_mode(mode: TorchFunctionMode) -> int:
    """Take a mode off the stack; return how many modes were above it."""
    above = _popped_above(mode)
    _pop_mode()
    _put_back(above)
    return len(above)


def push_mode(mode: TorchFunctionMode, above: int) -> None:
    """Put a mode back under as many modes as were above it before."""
    others = [_pop_mode() for _ in range(above)]
    _push_mode(mode)
    _put_back(others)


@contextmanager
def without_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """Run a block without the mode: compiled code must not meet it."""
    above = pop_mode(mode)
    try:
        yield
    finally:
        push_mode(mode, above)


def _popped_above(mode: TorchFunctionMode) -> list[TorchFunctionMode]:
    stack = _get_current_function_mode_stack()
    return [_pop_mode() for _ in range(len(stack) - 1 - stack.index(mode))]


def _put_back(modes: list[TorchFunctionMode]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)
