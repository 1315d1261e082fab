"""The one forward pass of a sampled step that is measured.

Training frameworks do not always call the model itself: Lightning calls
``training_step``, which calls a child. So the window opens at the outermost call of the
model or of one of its children, once per step for each; later micro-batches, evaluation
passes and the recomputed forward of activation checkpointing find it shut.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.interception import Interceptor
from equipoise.anatomy.names import unwrapped
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.emission import Emit


class AttentionTap:
    """Hands each attention call to the listeners, under its caller's name."""

    def __init__(
        self, anatomy: Anatomy, listeners: Sequence[Callable[..., None]], emit: Emit
    ) -> None:
        self._anatomy, self._listeners, self._emit = anatomy, listeners, emit
        self._calls: dict[str, int] = {}

    def interceptor(self) -> Interceptor:
        return Interceptor(self._anatomy.names, self._heard)

    def _heard(self, call: AttentionCall) -> None:
        site = self._site(call)
        for listener in self._listeners:
            listener(site, call, self._emit)

    def _site(self, call: AttentionCall) -> str:
        """Return the caller's name; shared layers are told apart by call number."""
        name = self._anatomy.names.get(id(call.module), "") if call.module else ""
        number = self._calls[name] = self._calls.get(name, -1) + 1
        return f"{name}#{number}" if number else name


class Window:
    """Open while the measured forward pass runs."""

    def __init__(self, model: nn.Module, *, only_training: bool) -> None:
        self._model, self._only_training = model, only_training
        self._depth = 0
        self._seen: set[int] = set()
        self._mode: ExitStack | None = None

    @property
    def open(self) -> bool:
        return self._mode is not None

    def only_inside(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return the hook, deaf while the window is shut."""

        def call(*args: Any, **kwargs: Any) -> None:
            if self.open:
                hook(*args, **kwargs)

        return call

    @contextmanager
    def installed(self, tap: AttentionTap) -> Iterator[None]:
        """Watch for the outermost call; the interceptor is active only inside it."""
        with ExitStack() as stack:
            stack.callback(self._shut)
            for entry in self._entries():
                before = entry.register_forward_pre_hook(
                    lambda module, args: self._before(module, tap)
                )
                stack.callback(before.remove)
                after = entry.register_forward_hook(self._after, always_call=True)
                stack.callback(after.remove)
            yield

    def _entries(self) -> list[nn.Module]:
        children = unwrapped(self._model).children()
        lists = (nn.ModuleList, nn.ModuleDict)  # never called themselves
        return [self._model, *(c for c in children if not isinstance(c, lists))]

    def _before(self, module: nn.Module, tap: AttentionTap) -> None:
        outermost, self._depth = self._depth == 0, self._depth + 1
        counts = torch.is_grad_enabled() or not self._only_training
        if outermost and counts and id(module) not in self._seen:
            self._seen.add(id(module))
            self._mode = ExitStack()
            self._mode.enter_context(tap.interceptor())

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._shut()

    def _shut(self) -> None:
        if self._mode is not None:
            self._mode.close()
            self._mode = None
