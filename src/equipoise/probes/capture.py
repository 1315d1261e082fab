"""Capture one forward pass: attach probes to a model, and collect what they emit.

A probe reads in one or more ways: modules, through hooks it registers; attention calls,
which the interceptor hands to it while the model runs; gradients, once a backward pass
is over; weights, once the optimiser has moved them. It hands over small tensors, which
travel to the host together, and nothing waits for them. ``Boundary`` is the one place
where an exception of ours meets the user's loop.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.hooks import inside_torch_func
from equipoise.anatomy.interception import Interceptor, Watched
from equipoise.anatomy.sharding import head_split
from equipoise.anatomy.sites import Anatomy, Gaps, Reason
from equipoise.probes.facts import PendingFacts
from equipoise.probes.protocols import (
    AttentionProbe,
    Emit,
    Hook,
    How,
    ModuleProbe,
    OperationProbe,
    OtherAxisProbe,
    PassProbe,
    Probe,
    implements,
)
from equipoise.probes.sharding import Parts, Shard, Transfer
from equipoise.probes.window import Window

log = logging.getLogger("equipoise")
_DEVICES = ("cpu", "cuda")


@dataclass(slots=True)
class Boundary:
    """Runs what is ours: no_grad, out of autocast, never again after it failed."""

    strict: bool = False
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around every call: measures what we cost."""
    failed: dict[str, BaseException] = field(default_factory=dict)
    """Name → its exception. What failed is not called again."""

    def guarded(self, name: str, hook: Hook) -> Hook:
        """Return the hook, safe to call from the user's training loop."""

        def call(*args: Any, **kwargs: Any) -> None:
            # Traced into the user's compiled code, a hook must add nothing to it.
            if (
                torch.compiler.is_compiling()
                or inside_torch_func()
                or name in self.failed
            ):
                return
            try:
                with self.around(), torch.no_grad():
                    if any(map(torch.is_autocast_enabled, _DEVICES)):
                        with _full_precision():
                            hook(*args, **kwargs)
                    else:
                        hook(*args, **kwargs)
            except Exception as failure:
                if self.strict:
                    raise
                self.failed[name] = failure
                log.exception("equipoise: %s failed and was detached", name)

        return call


@contextmanager
def _full_precision() -> Iterator[None]:
    """Leave the model's autocast: a measurement is made in the dtype it asks for."""
    on = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    outer = autocast_left()
    _left.dtypes = {device: torch.get_autocast_dtype(device) for device in on}
    try:
        with ExitStack() as stack:
            for device in on:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        _left.dtypes = outer


_left = threading.local()


def autocast_left() -> dict[str, torch.dtype]:
    """Return the autocast of the model's code around a hook: device → dtype."""
    dtypes: dict[str, torch.dtype] = getattr(_left, "dtypes", {})
    return dtypes


@dataclass(frozen=True, slots=True)
class SiteValues:
    """The values of one quantity at one site, on the host."""

    values: tuple[float, ...]
    how: How
    first: int = 0
    """Which head the first value is of: tensor parallelism gives a rank some heads."""


Table = dict[str, dict[str, SiteValues]]
"""quantity → site → values."""


@dataclass(slots=True)
class _Emitted:
    values: Tensor
    how: How
    by_head: bool
    count: int = 1


class Pending(Protocol):
    """Numbers that wait on a device for the next transfer."""

    def waiting(self) -> list[Tensor]: ...

    def arrived(self, numbers: Sequence[tuple[float, ...]]) -> None: ...


class Collector:
    """Collects what probes emit, by (quantity, site), in order of first emission."""

    def __init__(self, gaps: Gaps | None = None) -> None:
        self._emitted: dict[tuple[str, str], _Emitted] = {}
        self.gaps = Gaps() if gaps is None else gaps

    def __call__(
        self, site: str, quantity: str, values: Tensor, *, how: How = "last"
    ) -> None:
        new = values.detach().reshape(-1)
        old = self._emitted.get((quantity, site))
        if old is None:
            self._emitted[quantity, site] = _Emitted(new, how, values.ndim > 0)
            return
        old.values, old.count = _combine(old, new), old.count + 1

    def not_read(self, site: str, why: Reason) -> None:
        self.gaps.add_partial(site, why)

    def has(self, family: str) -> bool:
        """Return whether a reading of this name was collected, such as ``norm.*``."""
        start = family.rstrip("*")
        return any(quantity.startswith(start) for quantity, _ in self._emitted)

    def sites(self, family: str) -> set[str]:
        """Return the sites of which a reading of this name was collected."""
        start = family.rstrip("*")
        return {site for name, site in self._emitted if name.startswith(start)}

    def pop(self) -> Table:
        """Return everything collected, once it is on the host, and start afresh."""
        return self.send().table()

    def send(
        self,
        first_heads: Mapping[str, int] | None = None,
        also: Pending | None = None,
        parts: Mapping[str, Parts] | None = None,
        facts: PendingFacts | None = None,
    ) -> "HostTransfer":
        """Send everything collected to the host, with one transfer, and start afresh.

        ``first_heads`` names the sites of which this rank holds later heads only;
        what else is ``also`` waiting on the device comes with the same transfer, and
        so do the ``parts`` of each probe and the ``facts`` of the step.
        """
        emitted, self._emitted = self._emitted, {}
        return HostTransfer(emitted, first_heads or {}, also, parts or {}, facts)


class HostTransfer:
    """What was collected, on its way to the host."""

    def __init__(
        self,
        emitted: dict[tuple[str, str], _Emitted],
        firsts: Mapping[str, int],
        also: Pending | None,
        parts: Mapping[str, Parts],
        facts: PendingFacts | None = None,
    ) -> None:
        self._emitted, self._firsts, self._also = emitted, firsts, also
        self._parts, self._facts = parts, facts or PendingFacts({})
        waiting = [] if also is None else also.waiting()
        self._scalars, waiting = len(waiting), [*waiting, *self._facts.waiting()]
        values = [cell.values for cell in emitted.values()]
        shared = [part.values for some in parts.values() for part in some.values()]
        self._numbers = len(values) + len(waiting)
        self._transfer = Transfer([*values, *waiting, *shared])

    @property
    def arrived(self) -> bool:
        """Whether all of it is on the host; asking waits for nothing."""
        return self._transfer.arrived

    def table(self) -> Table:
        """Return it by quantity and site; wait for what has not arrived."""
        moved, count = self._transfer.numbers(self._numbers), len(self._emitted)
        also, facts = moved[count:][: self._scalars], moved[count + self._scalars :]
        if self._also is not None:
            self._also.arrived(also)
        self._facts.arrived(facts)
        table: Table = {}
        pairs = zip(self._emitted.items(), moved[:count], strict=True)
        for ((quantity, site), cell), values in pairs:
            first = self._firsts.get(site, 0) if cell.by_head else 0
            table.setdefault(quantity, {})[site] = SiteValues(values, cell.how, first)
        return table

    def facts(self) -> dict[str, Any]:
        """Return the facts of the step; :meth:`table` comes first."""
        return self._facts.sections

    def parts(self) -> dict[str, Parts]:
        """Return each probe's parts, on the host; wait for what has not arrived."""
        there = iter(self._transfer.tensors(self._numbers))
        return {
            probe: {
                name: Shard(next(there).view(part.values.shape), part.split)
                for name, part in some.items()
            }
            for probe, some in self._parts.items()
        }


def _combine(old: _Emitted, new: Tensor) -> Tensor:
    """Return two samples of one step as one."""
    if old.how == "max":
        return torch.maximum(old.values, new)
    if old.how == "min":
        return torch.minimum(old.values, new)
    if old.how == "sum":
        return old.values + new
    if old.how == "mean":
        return old.values + (new - old.values) / (old.count + 1)
    return new


@dataclass(slots=True)
class PassCoverage:
    """What one sampled step showed of each attention site, by name."""

    started: bool = False
    """Whether a forward pass began while probes were attached."""
    ran: set[str] = field(default_factory=set)
    """Sites whose forward ran to its end: one that raised could not be read."""
    read: set[str] = field(default_factory=set)
    """Sites whose attention was read."""
    gaps: Gaps = field(default_factory=Gaps)
    """What was met and could not be read."""
    first_heads: dict[str, int] = field(default_factory=dict)
    """Of the sites whose first heads other ranks hold: which head is the first here."""

    def attach(self, anatomy: Anatomy) -> Iterator[RemovableHandle]:
        """Yield one hook per expected site, which notes that it ran."""
        self.started = True
        for site in anatomy.attention:
            yield hooks.after(site.module, partial(_note, self.ran, site.name))


def _note(names: set[str], name: str, *called: Any) -> None:
    names.add(name)


class CallDispatcher:
    """Hands each attention call to the probes, under its caller's name."""

    def __init__(
        self,
        anatomy: Anatomy,
        listeners: Sequence[Hook],
        emit: Emit,
        *,
        coverage: PassCoverage,
    ) -> None:
        self._anatomy, self._listeners, self._emit = anatomy, listeners, emit
        self._calls: dict[str, int] = {}
        self._coverage = coverage

    def interceptor(
        self,
        guarded: Callable[..., Any],
        *,
        watched: Watched,
        askew: Callable[[AttentionCall], None],
    ) -> Interceptor:
        return Interceptor(
            self._anatomy,
            self._dispatch,
            guarded=guarded,
            gaps=self._coverage.gaps,
            watched=watched,
            askew=askew,
        )

    def _dispatch(self, call: AttentionCall) -> None:
        site = self._count_call(call)
        if 0 in call.shape:  # a batch without rows
            return
        if part := head_split(call.module).part:
            self._coverage.first_heads[site] = part * call.shape[1]
        for listener in self._listeners:
            listener(site, call, self._emit)

    def _count_call(self, call: AttentionCall) -> str:
        """Note that a caller was read; return its name, numbered in a shared layer."""
        name = self._anatomy.names.get(id(call.module), "") if call.module else ""
        self._coverage.read.add(name)
        number = self._calls[name] = self._calls.get(name, -1) + 1
        return f"{name}#{number}" if number else name


class Capture:
    """What one sampled step is captured with; its parts may run one by one."""

    def __init__(
        self,
        probes: Iterable[Probe],
        anatomy: Anatomy,
        emit: Emit,
        *,
        boundary: Boundary,
        coverage: PassCoverage | None = None,
    ) -> None:
        self._anatomy, self._emit, self._boundary = anatomy, emit, boundary
        self._probes = [probe for probe in probes if probe.name not in boundary.failed]
        self._coverage = coverage or PassCoverage()
        listeners = _listeners(self._probes, boundary)
        self._dispatcher = CallDispatcher(
            anatomy, listeners, emit, coverage=self._coverage
        )
        self._begun = False
        self._interceptor: Interceptor | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Attach every probe now; detach every hook, whatever happens in the block.

        Handles are registered one by one, so a probe that fails half-way through
        ``attach`` leaves nothing behind either.
        """
        boundary, begun, self._begun = self._boundary, self._begun, True
        with ExitStack() as stack:
            for probe in self._probes:
                if implements(probe, PassProbe) and not begun:
                    boundary.guarded(probe.name, probe.begin_pass)()
                if implements(probe, ModuleProbe):
                    attach = boundary.guarded(probe.name, _attach)
                    attach(probe, self._anatomy, self._emit, boundary, stack)
            for handle in self._coverage.attach(self._anatomy):
                stack.callback(handle.remove)
            guarded = partial(boundary.guarded, "interception")
            watched, askew = _others(self._probes, boundary)
            self._interceptor = self._dispatcher.interceptor(
                guarded, watched=watched, askew=askew
            )
            stack.enter_context(self._interceptor)
            yield

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Nothing: one pass is read, and no other."""

    def finish_closing(self) -> None:
        """Take off the stack a mode that was closed while it ran."""
        if self._interceptor is not None:
            self._interceptor.leave_stack()


@contextmanager
def attached(
    probes: Iterable[Probe],
    anatomy: Anatomy,
    emit: Emit,
    *,
    boundary: Boundary,
    only_training: bool = False,
    coverage: PassCoverage | None = None,
) -> Iterator[Window]:
    """Measure the next forward pass within the block, and nothing else."""
    capture = Capture(probes, anatomy, emit, boundary=boundary, coverage=coverage)
    window = Window(anatomy.model, capture, only_training=only_training)
    with window.installed():
        yield window


def _attach(
    probe: ModuleProbe,
    anatomy: Anatomy,
    emit: Emit,
    boundary: Boundary,
    stack: ExitStack,
) -> None:
    for handle in probe.attach(anatomy, emit, partial(boundary.guarded, probe.name)):
        stack.callback(handle.remove)


def _others(
    probes: Iterable[Probe], boundary: Boundary
) -> tuple[Watched, Callable[[AttentionCall], None]]:
    """Return the listeners to other operations, and to softmaxes over another axis."""
    watched: dict[Any, Hook] = {}
    listening = []
    for probe in probes:
        if implements(probe, OperationProbe):
            hook = boundary.guarded(probe.name, probe.on_operation)
            watched |= dict.fromkeys(probe.operations, hook)
        if implements(probe, OtherAxisProbe):
            listening.append(boundary.guarded(probe.name, probe.on_other_axis))

    def askew(call: AttentionCall) -> None:
        for listener in listening:
            listener(call)

    return watched, askew


def _listeners(probes: Iterable[Probe], boundary: Boundary) -> list[Hook]:
    return [
        boundary.guarded(probe.name, probe.on_attention)
        for probe in probes
        if implements(probe, AttentionProbe)
    ]
