"""Attach probes to a model for the length of one forward pass, and leave no trace.

A probe listens in one or more ways: to modules, through hooks it registers; to
attention calls, which the interceptor hands to it while the model runs; to gradients,
once a backward pass is over; to weights, once the optimiser has moved them.

How a probe hands over what it measured.

The one place where an exception of ours meets the user's loop.

Which sites ran and which were heard, and by which name a call is filed.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.hooks import inside_torch_func
from equipoise.anatomy.interception import Interceptor
from equipoise.anatomy.sharding import head_split
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.sharding import Parts
from equipoise.probes.window import Window

How = Literal["mean", "max", "min", "sum", "norm", "last"]
"""How values of several ranks, or of several calls in a step, become one.

``norm``: the ranks hold parts of one vector, whose norm is √Σ‖part‖²; of several calls
the last counts, because it saw the sum.
"""


class Emit(Protocol):
    """Takes small, detached tensors, still on the device."""

    def __call__(
        self, site: str, quantity: str, values: Tensor, *, how: How = "last"
    ) -> None: ...


log = logging.getLogger("equipoise")

Hook = Callable[..., None]


@dataclass(slots=True)
class Boundary:
    """Runs what is ours: no_grad, out of autocast, silent after its first failure."""

    strict: bool = False
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around every call: whoever keeps the account of what we cost."""
    failed: dict[str, BaseException] = field(default_factory=dict)
    """Name → what it died of. What failed stays silent from then on."""

    def guarded(self, name: str, hook: Hook) -> Hook:
        """Return the hook, safe to call from somebody else's training loop."""

        def call(*args: Any, **kwargs: Any) -> None:
            # Traced into somebody's compiled code, a hook must add nothing to it.
            if (
                torch.compiler.is_compiling()
                or inside_torch_func()
                or name in self.failed
            ):
                return
            try:
                with self.around(), torch.no_grad(), _full_precision():
                    hook(*args, **kwargs)
            except Exception as failure:
                if self.strict:
                    raise
                self.failed[name] = failure
                log.exception("equipoise: %s failed and was detached", name)

        return call


@contextmanager
def _full_precision() -> Iterator[None]:
    """Leave the patient's autocast: a measurement is made in the dtype it asks for."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class Guarded(Protocol):
    """Makes a hook safe: no_grad, no autocast, its exceptions kept from the loop."""

    def __call__(self, hook: Hook) -> Hook: ...


@runtime_checkable
class Probe(Protocol):
    """Something that listens to a model and emits small tensors.

    ``attach`` is called when the measured forward pass begins and yields one handle per
    hook as soon as the hook exists; all are off again when that pass ends. Every hook
    goes through ``guarded``. What must be heard in the backward pass is a hook on a
    tensor of the graph, which dies with the graph.
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
class GradientProbe(Probe, Protocol):
    """A probe that also looks after each backward pass, before anybody clips.

    By then DDP and FSDP have reduced; ``scale`` is the factor of a GradScaler, which
    the gradients still carry.
    """

    def on_gradients(
        self, anatomy: Anatomy, emit: Emit, *, scale: Tensor | None
    ) -> None: ...


@runtime_checkable
class UpdateProbe(Probe, Protocol):
    """A probe that also looks once the optimiser has moved the weights."""

    def on_update(self, optimizer: Optimizer, emit: Emit) -> None: ...


@runtime_checkable
class SharingProbe(Probe, Protocol):
    """A probe that also reads what no rank holds whole.

    ``begin`` is called once on every rank, outside any pass, where asking the others is
    allowed, and returns how many numbers to make room for. ``parts`` are what this rank
    adds to the one exchange of a sampled step; ``on_parts`` is handed every rank's, the
    same on all of them.
    """

    def begin(self, anatomy: Anatomy) -> int: ...

    def parts(self) -> Parts: ...

    def on_parts(self, ranks: Sequence[Parts], emit: Emit) -> None: ...


@dataclass(slots=True)
class Heard:
    """What one sampled step showed of each attention site, by name."""

    passed: bool = False
    """Whether a forward pass began while we listened."""
    ran: set[str] = field(default_factory=set)
    """Sites whose forward ran to its end: one that raised had no chance to speak."""
    attention: set[str] = field(default_factory=set)
    """Sites whose attention was read."""
    first_heads: dict[str, int] = field(default_factory=dict)
    """Of the sites whose first heads other ranks hold: which head is the first here."""

    def attach(self, anatomy: Anatomy) -> Iterator[RemovableHandle]:
        """Yield one hook per expected site, which notes that it ran."""
        self.passed = True
        for site in anatomy.attention:
            yield hooks.after(site.module, _note(self.ran, site.name))


def _note(names: set[str], name: str) -> Callable[..., None]:
    def note(module: Any, args: Any, output: Any) -> None:
        names.add(name)

    return note


class AttentionTap:
    """Hands each attention call to the listeners, under its caller's name."""

    def __init__(
        self,
        anatomy: Anatomy,
        listeners: Sequence[Callable[..., None]],
        emit: Emit,
        *,
        heard: Heard,
    ) -> None:
        self._anatomy, self._listeners, self._emit = anatomy, listeners, emit
        self._calls: dict[str, int] = {}
        self._heard_sites, self._first_heads = heard.attention, heard.first_heads

    def interceptor(self, guarded: Callable[..., Any]) -> Interceptor:
        return Interceptor(self._anatomy, self._heard, guarded=guarded)

    def _heard(self, call: AttentionCall) -> None:
        site = self._site(call)
        if 0 in call.shape:  # a batch without rows
            return
        if part := head_split(call.module).part:
            self._first_heads[site] = part * call.shape[1]
        for listener in self._listeners:
            listener(site, call, self._emit)

    def _site(self, call: AttentionCall) -> str:
        """Return the caller's name; shared layers are told apart by call number."""
        name = self._anatomy.names.get(id(call.module), "") if call.module else ""
        self._heard_sites.add(name)
        number = self._calls[name] = self._calls.get(name, -1) + 1
        return f"{name}#{number}" if number else name


@contextmanager
def listening(
    probes: Iterable[Probe],
    anatomy: Anatomy,
    emit: Emit,
    *,
    boundary: Boundary,
    heard: Heard | None = None,
) -> Iterator[None]:
    """Attach every probe now; detach every hook, whatever happens inside the block.

    Handles are taken one by one, so a probe that fails half-way through ``attach``
    leaves nothing behind either.
    """
    heard = heard or Heard()
    living = [probe for probe in probes if probe.name not in boundary.failed]
    tap = AttentionTap(anatomy, _listeners(living, boundary), emit, heard=heard)
    with ExitStack() as stack:
        for probe in living:
            attach = boundary.guarded(probe.name, _attach)
            attach(probe, anatomy, emit, boundary, stack)
        for handle in heard.attach(anatomy):
            stack.callback(handle.remove)
        guarded = partial(boundary.guarded, "interception")
        stack.enter_context(tap.interceptor(guarded))
        yield


@contextmanager
def attached(
    probes: Iterable[Probe],
    anatomy: Anatomy,
    emit: Emit,
    *,
    boundary: Boundary,
    only_training: bool = False,
    heard: Heard | None = None,
    traced: Callable[[], object] | None = None,
) -> Iterator[Window]:
    """Measure the next forward pass within the block, and nothing else.

    ``traced`` is called, while it is compiled, by a function that calls the model.
    """
    opening = partial(
        listening, list(probes), anatomy, emit, boundary=boundary, heard=heard
    )
    window = Window(anatomy.model, opening, only_training=only_training, traced=traced)
    with window.installed():
        yield window


def _attach(
    probe: Probe, anatomy: Anatomy, emit: Emit, boundary: Boundary, stack: ExitStack
) -> None:
    for handle in probe.attach(anatomy, emit, partial(boundary.guarded, probe.name)):
        stack.callback(handle.remove)


def _listeners(probes: Iterable[Probe], boundary: Boundary) -> list[Hook]:
    return [
        boundary.guarded(probe.name, probe.on_attention)
        for probe in probes
        if isinstance(probe, AttentionProbe)
    ]
