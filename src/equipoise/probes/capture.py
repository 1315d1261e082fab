"""Attach probes to a model for the length of one sampled step, and leave no trace.

A probe listens in one or both of two ways: to modules, through hooks it registers;
and to attention calls, which the interceptor hands to it while the model runs.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.emission import Emit
from equipoise.probes.window import AttentionTap, Window

log = logging.getLogger("equipoise")

Hook = Callable[..., None]


class Guarded(Protocol):
    """Makes a hook safe: no_grad, no autocast, its exceptions kept from the loop.

    A hook is heard only during the one forward pass that is measured, unless it is
    for the backward pass, which comes after.
    """

    def __call__(self, hook: Hook, *, backward: bool = False) -> Hook: ...


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
        window = Window(anatomy.model, only_training=only_training)
        for probe in probes:
            for handle in probe.attach(anatomy, emit, _guard(boundary, probe, window)):
                stack.callback(handle.remove)
        listeners = [
            boundary.guarded(p.name, p.on_attention)
            for p in probes
            if isinstance(p, AttentionProbe)
        ]
        stack.enter_context(window.installed(AttentionTap(anatomy, listeners, emit)))
        yield


def _guard(boundary: Boundary, probe: Probe, window: Window) -> Guarded:
    def guarded(hook: Hook, *, backward: bool = False) -> Hook:
        safe = boundary.guarded(probe.name, hook)
        return safe if backward else window.only_inside(safe)

    return guarded
