"""The window: the one forward pass of a sampled step that is measured.

Training frameworks do not always call the model itself: Lightning calls
``training_step``, which calls a child. So the window opens at the outermost call of the
model or of one of its children, once per step for each; later micro-batches, evaluation
passes and the recomputed forward of activation checkpointing find it closed.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from equipoise.anatomy.sites import unwrapped

# Lists are never called; torch's own layers leave their fast path in evaluation when
# they carry a hook, and would then round differently.
NEVER_HOOKED = (
    nn.ModuleList,
    nn.ModuleDict,
    nn.MultiheadAttention,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
)

Opening = Callable[[], AbstractContextManager[None]]


class CopySafeHook:
    """A hook that stays on the user's model between two steps.

    Meanwhile the model may be copied (weight averaging) or pickled. The copy is not
    watched: it gets a callable that does nothing, and that needs nothing of ours to
    be loaded elsewhere.
    """

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        self._act(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return NOTHING

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (logging.getLogger("equipoise.copy"), "debug")


# Takes anything, returns None, and is the standard library's.
NOTHING: Callable[..., None] = logging.getLogger("equipoise.copy").debug


class _Depth(threading.local):
    """How many hooked calls the running thread is inside."""

    calls: int = 0


class Window:
    """Opens ``capturing()`` while the measured forward pass runs, and only then.

    Each thread counts its own calls: another one that evaluates the same model
    meanwhile neither opens the window nor closes it.
    """

    def __init__(
        self,
        model: nn.Module,
        capturing: Opening,
        *,
        only_training: bool,
        traced: Callable[[], object] | None = None,
    ) -> None:
        self._model, self._capturing = model, capturing
        self._only_training, self._traced = only_training, traced
        self._depth, self._opener = _Depth(), 0
        self._seen: set[int] = set()
        self._inside: ExitStack | None = None
        self._hooks = ExitStack()

    @property
    def opened(self) -> bool:
        """Whether a forward pass was measured."""
        return bool(self._seen)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Wait for the outermost call; leave nothing on the model afterwards."""
        with ExitStack() as stack:
            stack.callback(self._hooks.close)
            stack.callback(self._close)
            for entry in self._entries():
                enter, leave = CopySafeHook(self._before), CopySafeHook(self._after)
                before = entry.register_forward_pre_hook(enter)
                self._hooks.callback(before.remove)
                after = entry.register_forward_hook(leave, always_call=True)
                self._hooks.callback(after.remove)
            yield

    def _entries(self) -> list[nn.Module]:
        children = unwrapped(self._model).children()
        return [self._model, *(c for c in children if not isinstance(c, NEVER_HOOKED))]

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            # A caller of the model is being compiled: add nothing to its graph.
            if self._traced is not None and torch.is_grad_enabled():
                self._traced()
            return
        if self._depth.calls == 0 and _inside_compiled_function():
            return
        outermost = self._depth.calls == 0 and self._inside is None
        self._depth.calls += 1
        counts = torch.is_grad_enabled() or not self._only_training
        if outermost and counts and id(module) not in self._seen:
            self._seen.add(id(module))
            self._inside, self._opener = ExitStack(), threading.get_ident()
            self._inside.enter_context(self._capturing())

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._depth.calls == 0:
            return
        self._depth.calls -= 1
        if self._depth.calls == 0 and self._opener == threading.get_ident():
            self._close()

    def _close(self) -> None:
        if self._inside is not None:
            inside, self._inside = self._inside, None
            inside.close()


def _inside_compiled_function() -> bool:
    """Return whether the call comes from a compiled function whose graph broke.

    Such a function calls the model as Python does, but only until it compiles again.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and "_dynamo" in code.co_filename:
            return True
        frame = frame.f_back
    return False
