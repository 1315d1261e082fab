"""How one step is sampled: the effects that attach probes, and let them read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.sites import Anatomy, named
from equipoise.probes.capture import (
    Boundary,
    Capture,
    Collector,
    HostTransfer,
    PassCoverage,
    Pending,
    Table,
)
from equipoise.probes.facts import PendingFacts
from equipoise.probes.loop_events import LoopEvent, LoopProbe, SampleEndProbe
from equipoise.probes.protocols import (
    BackwardProbe,
    BeforeUpdateProbe,
    CallProbe,
    FactProbe,
    GradientProbe,
    Probe,
    SharingProbe,
    StepProbe,
    UpdateProbe,
    WithAnatomy,
    implements,
)
from equipoise.probes.sharding import Parts, copies_late
from equipoise.probes.window import (
    BY_FORWARD,
    CHANGED,
    NO_GRADIENTS,
    Window,
    called_as_forward,
    parts_not_read,
)
from equipoise.watching.loop.torch_events import inside_backward
from equipoise.watching.ranks.group import Ranks
from equipoise.watching.step.batch import BatchCapture, compiled_parts
from equipoise.watching.step.coverage import PROMISED
from equipoise.watching.step.layers import LayerCoverage
from equipoise.watching.step.machine import (
    Event,
    ForwardBegins,
    ForwardEnds,
    Source,
    Step,
)

Exchange = Literal["none", "at once", "late"]
"""When the ranks exchange a sample."""


class Sampler:
    """Carries out what measures: attaches probes for a step, and detaches them."""

    def __init__(
        self,
        anatomy: Anatomy,
        probes: Sequence[Probe],
        *,
        boundary: Boundary,
        only_training: bool,
        notice: Callable[[Event], None],
    ) -> None:
        self.anatomy, self.probes, self.boundary = anatomy, list(probes), boundary
        self._counting = [probe for probe in probes if implements(probe, LoopProbe)]
        self._only_training, self._notice = only_training, notice
        self.exchange: Exchange = "none"
        self._stack, self._inside = ExitStack(), ExitStack()
        self._coverage, self._layers = PassCoverage(), LayerCoverage()
        self._collector = Collector(self._coverage.gaps)
        self._batch_capture: BatchCapture | None = None
        self._capture: Capture | None = None
        self._window: Window | None = None
        self._describe(anatomy)

    def _describe(self, anatomy: Anatomy) -> None:
        """Let probes know the model before its first pass: a closure runs it late."""
        self.anatomy = anatomy
        for probe in self.probes:
            if isinstance(probe, WithAnatomy):
                probe.describe(anatomy)

    def begin(self, ranks: Ranks, *, acts: bool) -> None:
        """Let probes ask the other ranks, all of which are here, outside any pass.

        Devices exchange samples ``late``, as the next step ends, if no autopilot acts.
        """
        if ranks.count == 1:
            return
        late = copies_late(self.anatomy.model) and not acts
        self.exchange = ranks.broadcast("exchange", "late" if late else "at once")
        numbers = [0]

        def begin(probe: SharingProbe) -> None:
            numbers.append(probe.begin(self.anatomy))

        for probe in self._sharing():
            self.boundary.guarded(probe.name, begin)(probe)
        ranks.reserve(4 * sum(numbers))

    @property
    def late(self) -> bool:
        """Whether ranks exchange a sample when the next step ends."""
        return self.exchange == "late"

    @property
    def source(self) -> Source:
        """How the next step can be measured: compiled code has no room for hooks."""
        return "replay" if compiled_parts(self.anatomy.model) else "hooks"

    # Effects, in the order of a step.

    def arm(self, step: Step) -> None:
        """Wait for the next forward pass, of this step."""
        assert step.coverage is not None
        self.drop()
        for probe in self.probes:
            if implements(probe, StepProbe):
                probe.begin_step(step.number)
        self._coverage, self._capture = step.coverage, None
        self._collector = Collector(self._coverage.gaps)
        model, training = self.anatomy.model, self._only_training
        if step.source == "replay":
            stored = partial(self._notice, ForwardEnds(seen=True))
            self._batch_capture = BatchCapture(
                model, only_training=training, stored=stored
            )
            self._stack.enter_context(self._batch_capture.installed())
            return
        self._window = Window(model, self, only_training=training)
        self._stack.enter_context(self._window.installed())

    @contextmanager
    def open(self) -> Iterator[None]:
        """Called by the window around what it measures: the machine decides."""
        window = self._window
        with ExitStack() as self._inside:
            self._notice(ForwardBegins(in_backward=inside_backward()))
            yield
        self._notice(ForwardEnds(seen=window is not None and window.opened))

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Let probes know of a call of the model, whether it is measured or not."""
        graded = torch.is_grad_enabled()
        for probe in self.probes:
            if implements(probe, CallProbe):
                call = self.boundary.guarded(probe.name, probe.on_call)
                call(module, args, kwargs, graded=graded)

    def finish_closing(self) -> None:
        """Finish a closing that began where a mode cannot leave the stack."""
        if self._capture is not None:
            self._capture.finish_closing()

    def attach_probes(self) -> None:
        """Attach the probes to the model as it is when its pass begins."""
        self._inside.enter_context(self._opened_capture())

    def close_window(self) -> None:
        """Stop measuring: the forward pass is over."""
        if self._window is not None:
            self._window.close()

    def _opened_capture(self) -> AbstractContextManager[None]:
        if self._capture is None:
            self.boundary.guarded("anatomy", self._renew)()
            self._capture = Capture(
                self.probes,
                self.anatomy,
                self._collector,
                boundary=self.boundary,
                coverage=self._coverage,
            )
        return self._capture.open()

    def _renew(self) -> None:
        """Find the sites anew where modules were added, replaced or removed."""
        model = self.anatomy.model
        if {id(module): name for name, module in named(model)} == self.anatomy.names:
            return
        if self.exchange != "none":  # what the ranks agreed on still counts
            self._collector.not_read("", CHANGED)
        else:
            self._describe(anatomy_of(model))

    def read_graph(self, roots: Sequence[Tensor]) -> None:
        """Read the graph of a loss before its backward pass."""
        for probe in self.probes:
            if implements(probe, BackwardProbe):
                guarded = partial(self.boundary.guarded, probe.name)
                guarded(probe.before_backward)(roots, guarded)

    def read_gradients(self, scale: Tensor | None) -> None:
        """Read gradients while they are complete."""
        for probe in self.probes:
            if implements(probe, GradientProbe):
                read = self.boundary.guarded(probe.name, probe.on_gradients)
                read(self.anatomy, self._collector, scale=scale)

    def replay(self) -> None:
        """Run the stored micro-batch again with the probes attached."""
        assert self._batch_capture is not None
        batch, model = self._batch_capture.batch, self.anatomy.model
        self._stack.close()

        def replay() -> None:
            assert batch is not None
            with self._opened_capture():
                batch.replay(model)

        self.boundary.guarded("probe pass", replay)()

    def copy_weights(self, optimizer: Optimizer) -> None:
        """Let probes copy weights that an optimiser is about to move."""
        for probe in self.probes:
            if implements(probe, BeforeUpdateProbe):
                copy = self.boundary.guarded(probe.name, probe.before_update)
                copy(optimizer, self._collector)

    def read_update(self, optimizer: Optimizer) -> None:
        """Read what an optimiser did to the weights."""
        for probe in self.probes:
            if implements(probe, UpdateProbe):
                read = self.boundary.guarded(probe.name, probe.on_update)
                read(optimizer, self._collector)

    def on_loop(self, event: LoopEvent) -> None:
        """Let probes count what the loop does, in every step."""
        for probe in self._counting:
            self.boundary.guarded(probe.name, probe.on_loop)(event)

    def finish(self, step: Step, also: Pending) -> HostTransfer:
        """Take everything off the model, and send what was measured to the host.

        What is ``also`` waiting on the device comes with the same transfer.
        """
        self._note_parts(step)
        self._coverage.gaps.missing.extend(self._missing(step))
        self.drop()
        parts = self.parts() if self.exchange != "none" else {}
        facts = PendingFacts(self._facts())
        for probe in self.probes:
            if implements(probe, SampleEndProbe):
                probe.end_sample()
        return self._collector.send(self._coverage.first_heads, also, parts, facts)

    def drop(self) -> None:
        """Take everything off the model."""
        self._stack.close()
        self._batch_capture, self._window = None, None

    def _facts(self) -> dict[str, Any]:
        """Return the facts of this step, by section."""
        found: dict[str, Any] = {}
        if self._coverage.started:
            self.boundary.guarded("coverage", self._count_layers)(found)

        def state(probe: FactProbe) -> None:
            found[probe.name] = dict(probe.facts())

        for probe in self.probes:
            if implements(probe, FactProbe):
                self.boundary.guarded(probe.name, state)(probe)
        return found

    def _count_layers(self, found: dict[str, Any]) -> None:
        gated = self._collector.sites("mixer.*")
        layers = self._layers.add(self.anatomy, self._coverage, gated)
        found["coverage"] = {"layers": layers}

    def parts(self) -> dict[str, Parts]:
        """Return what this rank holds of readings that no rank can make alone."""
        parts = {probe.name: probe.parts() for probe in self._sharing()}
        return {name: mine for name, mine in parts.items() if mine}

    def read_parts(self, ranks: Sequence[dict[str, Parts]]) -> Table:
        """Return the readings that all ranks' parts make, the same on every rank."""
        emit = Collector(self._coverage.gaps)
        for probe in self._sharing():
            theirs = [parts.get(probe.name, {}) for parts in ranks]
            if any(theirs):
                self.boundary.guarded(probe.name, probe.on_parts)(theirs, emit)
        return emit.pop()

    def leave_group(self) -> None:
        """Have every probe read for this rank alone from now on."""
        self.exchange = "none" if self.exchange == "none" else "at once"
        for probe in self.probes:
            if hasattr(probe, "ranks"):
                probe.ranks = 1

    def _sharing(self) -> list[SharingProbe]:
        return [probe for probe in self.probes if implements(probe, SharingProbe)]

    def _note_parts(self, step: Step) -> None:
        """Note what is not read of parts that ran, and of gradients."""
        if self._window is None or not self._window.opened:
            return
        not_read = self._collector.not_read
        for name, why in parts_not_read(self._window, self.anatomy):
            not_read(name, why)
        trained = self._only_training or step.gradients != "unread"
        if trained and step.gradients != "read":
            not_read("", NO_GRADIENTS)
        for name in called_as_forward(self._window, self.anatomy):
            if name not in self._coverage.read:
                self._coverage.gaps.unread.setdefault(name, BY_FORWARD)

    def _missing(self, step: Step) -> Iterator[str]:
        """Yield the families of readings that this step should have brought."""
        trained = step.gradients != "unread"
        by_hand = trained and not self._only_training
        due = {"gradients": trained, "updates": bool(step.updates) or by_hand}
        due["gain"] = due["magnitudes"] = bool(self._coverage.read)
        for probe in self.probes if step.passes else ():
            # What takes all ranks comes later, from their exchange.
            exchanged = self.exchange != "none" and implements(probe, SharingProbe)
            off = exchanged or probe.name in self.boundary.failed
            family = PROMISED.get(probe.name) if not off else None
            absent = family is not None and not self._collector.has(family)
            if absent and due.get(probe.name, True):
                yield PROMISED[probe.name]
