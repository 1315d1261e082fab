"""Step a torch-function mode out of the way, and put it back where it stood."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)


def stands(mode: TorchFunctionMode) -> bool:
    """Return whether a mode is on: each thread has a stack of its own."""
    return any(mode is other for other in _get_current_function_mode_stack())


def transformed() -> bool:
    """Return whether ``torch.func`` is at work: its tensors hold no numbers to read."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def step_aside(mode: TorchFunctionMode) -> int:
    """Take a mode off the stack; return how many modes stood above it."""
    above = _taken_above(mode)
    _pop_mode()
    _put_back(above)
    return len(above)


def step_back(mode: TorchFunctionMode, above: int) -> None:
    """Put a mode back under as many modes as stood above it before."""
    others = [_pop_mode() for _ in range(above)]
    _push_mode(mode)
    _put_back(others)


@contextmanager
def aside(mode: TorchFunctionMode) -> Iterator[None]:
    """Run a block as if the mode were not there: compiled code must not meet it."""
    above = step_aside(mode)
    try:
        yield
    finally:
        step_back(mode, above)


def _taken_above(mode: TorchFunctionMode) -> list[TorchFunctionMode]:
    stack = _get_current_function_mode_stack()
    return [_pop_mode() for _ in range(len(stack) - 1 - stack.index(mode))]


def _put_back(modes: list[TorchFunctionMode]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)
