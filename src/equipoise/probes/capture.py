"""Attach probes to a model for the length of one forward pass, and leave no trace.

A probe listens in one or more ways: to modules, through hooks it registers; to
attention calls, which the interceptor hands to it while the model runs; to gradients,
once a backward pass is over; to weights, once the optimiser has moved them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.boundary import Boundary, Hook
from equipoise.probes.emission import Emit
from equipoise.probes.heard import AttentionTap, Heard
from equipoise.probes.sharing import Parts
from equipoise.probes.window import Window


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
