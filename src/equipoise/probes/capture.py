"""Attach probes to a model for the length of one sampled step, and leave no trace.

A probe listens in one or both of two ways: to modules, through hooks it registers;
and to attention calls, which the interceptor hands to it while the model runs.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.interception import Interceptor
from equipoise.anatomy.sites import Anatomy

log = logging.getLogger("equipoise")

How = Literal["mean", "max", "min", "sum", "last"]
"""How values of several micro-batches or ranks become one."""


class Emit(Protocol):
    """Takes small, detached tensors, still on the device."""

    def __call__(
        self, site: str, quantity: str, values: Tensor, *, how: How = "last"
    ) -> None: ...


Hook = Callable[..., None]
Guarded = Callable[[Hook], Callable[..., None]]


@runtime_checkable
class Probe(Protocol):
    """Something that listens to a model and emits small tensors.

    ``attach`` yields one handle per hook as soon as the hook exists; every hook goes
    through ``guarded``, which makes it no_grad, returns None, and keeps its exceptions
    away from the user's loop.
    """

    @property
    def name(self) -> str: ...

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]: ...


@runtime_checkable
class AttentionProbe(Probe, Protocol):
    """A probe that is also handed every attention call."""

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None: ...


@runtime_checkable
class UpdateProbe(Probe, Protocol):
    """A probe that also looks once the optimiser has moved the weights."""

    def on_update(self, optimizer: Optimizer, emit: Emit) -> None: ...


@dataclass(slots=True)
class Boundary:
    """The one place where an exception of ours meets the user's loop."""

    strict: bool = False
    failed: dict[str, BaseException] = field(default_factory=dict)
    """Probe name → what it died of. A failed probe stays silent from then on."""

    def guarded(self, probe: str, hook: Hook) -> Callable[..., None]:
        """Return the hook: no_grad, out of autocast, silent after its first failure."""

        def call(*args: Any, **kwargs: Any) -> None:
            if probe in self.failed:
                return
            try:
                with torch.no_grad(), _full_precision():
                    hook(*args, **kwargs)
            except Exception as failure:
                if self.strict:
                    raise
                self.failed[probe] = failure
                log.exception("equipoise: probe %s failed and was detached", probe)

        return call


@contextmanager
def _full_precision() -> Iterator[None]:
    """Leave the patient's autocast: a measurement is made in the dtype it asks for."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def attached(
    probes: Iterable[Probe],
    anatomy: Anatomy,
    emit: Emit,
    *,
    boundary: Boundary,
    only_training: bool = False,
) -> Iterator[None]:
    """Attach every probe; detach every hook, whatever happens inside the block.

    Handles are taken one by one, so a probe that fails half-way through ``attach``
    leaves nothing behind either.
    """
    probes = [probe for probe in probes if probe.name not in boundary.failed]
    with ExitStack() as stack:
        for probe in probes:
            name = probe.name
            guarded = lambda hook, name=name: boundary.guarded(name, hook)  # noqa: E731
            for handle in probe.attach(anatomy, emit, guarded):
                stack.callback(handle.remove)
        tap = _AttentionTap(probes, anatomy, emit, boundary, only_training)
        stack.enter_context(tap.installed())
        yield


class _AttentionTap:
    """Runs the interceptor while the model runs, and numbers repeated calls."""

    def __init__(
        self,
        probes: Iterable[Probe],
        anatomy: Anatomy,
        emit: Emit,
        boundary: Boundary,
        only_training: bool,
    ) -> None:
        self._anatomy = anatomy
        self._emit = emit
        self._only_training = only_training
        self._listeners = [
            boundary.guarded(p.name, p.on_attention)
            for p in probes
            if isinstance(p, AttentionProbe)
        ]
        self._calls: dict[str, int] = {}
        self._active: Interceptor | None = None
        self._mode = ExitStack()
        self._done = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        model = self._anatomy.model
        with ExitStack() as stack:
            before = model.register_forward_pre_hook(self._before)
            stack.callback(before.remove)
            after = model.register_forward_hook(self._after, always_call=True)
            stack.callback(after.remove)
            stack.callback(self._leave)
            yield

    def _before(self, module: nn.Module, args: Any) -> None:
        """Enter on the first forward that counts: one micro-batch is one sample."""
        idle = self._active is None and not self._done
        if idle and (torch.is_grad_enabled() or not self._only_training):
            self._active = Interceptor(self._anatomy.names, self._heard)
            self._mode.enter_context(self._active)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._done = self._done or self._active is not None
        self._leave()

    def _leave(self) -> None:
        if self._active is not None:
            self._mode.close()
            self._active = None

    def _heard(self, call: AttentionCall) -> None:
        site = self._site(call)
        for listener in self._listeners:
            listener(site, call, self._emit)

    def _site(self, call: AttentionCall) -> str:
        """Return the caller's name; shared layers are told apart by call number."""
        name = self._anatomy.names.get(id(call.module), "") if call.module else ""
        number = self._calls[name] = self._calls.get(name, -1) + 1
        return f"{name}#{number}" if number else name
