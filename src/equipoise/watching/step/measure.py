"""Which steps are sampled, what that costs, and how one step is sampled.

Steps are counted, never timed: all ranks sample the same steps, and a checkpoint can
carry the counter. The cost is in CPU seconds of the thread that trains.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

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
from equipoise.probes.protocols import (
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
from equipoise.watching.ranks.group import Ranks
from equipoise.watching.step.batch import BatchCapture, compiled_parts
from equipoise.watching.step.coverage import PROMISED
from equipoise.watching.step.layers import LayerCoverage


class Sampler:
    """Attaches probes for a step and detaches them; holds what they emitted."""

    def __init__(
        self,
        anatomy: Anatomy,
        probes: Sequence[Probe],
        *,
        boundary: Boundary,
        only_training: bool,
    ) -> None:
        self.anatomy, self.probes, self.boundary = anatomy, list(probes), boundary
        self._only_training = only_training
        self.coverage, self.layers = PassCoverage(), LayerCoverage()
        self._collector = Collector(self.coverage.gaps)
        self._stack = ExitStack()
        self._batch_capture: BatchCapture | None = None
        self._capture: Capture | None = None
        self._window: Window | None = None
        self.replaced: Callable[[], bool] = lambda: False
        """Whether the loop has set other gradients since the last backward pass."""
        self.armed = self._replayed = self._updated = False
        self._backward_seen = self._gradients_seen = self._shared = self.late = False
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
        self._shared = True
        late = str(copies_late(self.anatomy.model) and not acts)
        self.late, numbers = ranks.broadcast("late", late) == str(True), [0]

        def begin(probe: SharingProbe) -> None:
            numbers.append(probe.begin(self.anatomy))

        for probe in self._sharing():
            self.boundary.guarded(probe.name, begin)(probe)
        ranks.reserve(4 * sum(numbers))

    def arm(self, step: int) -> None:
        """Wait for the next forward pass, of this step."""
        for probe in self.probes:
            if implements(probe, StepProbe):
                probe.begin_step(step)
        self.coverage, self.armed, self._replayed = PassCoverage(), True, False
        self._capture, self._updated = None, False
        self._backward_seen = self._gradients_seen = False
        self._collector = Collector(self.coverage.gaps)
        if compiled_parts(self.anatomy.model):
            capture = BatchCapture(
                self.anatomy.model, only_training=self._only_training
            )
            self._stack.enter_context(capture.installed())
            self._batch_capture = capture
            return
        model, training = self.anatomy.model, self._only_training
        self._window = Window(model, self, only_training=training)
        self._stack.enter_context(self._window.installed())

    @contextmanager
    def open(self) -> Iterator[None]:
        """Attach the probes to the model as it is when its pass begins."""
        if self._capture is None:
            self.boundary.guarded("anatomy", self._renew)()
            self._capture = Capture(*self._probed, **self._reported)
        with self._capture.open():
            yield

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Let probes know of a call of the model, whether it is measured or not."""
        graded = torch.is_grad_enabled()
        for probe in self.probes if self.armed else ():
            if implements(probe, CallProbe):
                call = self.boundary.guarded(probe.name, probe.on_call)
                call(module, args, kwargs, graded=graded)

    def finish_closing(self) -> None:
        """Finish a closing that began where a mode cannot leave the stack."""
        if self._capture is not None:
            self._capture.finish_closing()

    def _renew(self) -> None:
        """Find the sites anew where modules were added, replaced or removed."""
        model = self.anatomy.model
        if {id(module): name for name, module in named(model)} == self.anatomy.names:
            return
        if self._shared:  # what the ranks agreed on at the start still counts
            self._collector.not_read("", CHANGED)
        else:
            self._describe(anatomy_of(model))

    @property
    def _probed(self) -> tuple[Any, ...]:
        """What a capture reads, with what, and where its readings go."""
        return self.probes, self.anatomy, self._collector

    @property
    def _reported(self) -> dict[str, Any]:
        """Where a capture's failures and gaps go."""
        return {"boundary": self.boundary, "coverage": self.coverage}

    @property
    def opened(self) -> bool:
        """Whether a forward pass of the step was seen."""
        if self._batch_capture is not None:
            return self._batch_capture.batch is not None
        if self._replayed:
            return True
        return self._window is not None and self._window.opened

    def before_backward(self) -> None:
        """Stop measuring: the forward pass is over."""
        if self._window is not None:
            self._window.close()

    def after_backward(self, scale: Tensor | None) -> None:
        """Read gradients while they are complete, and what compiled code hid."""
        if not self.armed:
            return
        self._backward_seen = True
        parameters = self.anatomy.model.parameters()
        self._gradients_seen |= any(p.grad is not None for p in parameters)
        for probe in self.probes:
            if implements(probe, GradientProbe):
                read = self.boundary.guarded(probe.name, probe.on_gradients)
                read(self.anatomy, self._collector, scale=scale)
        self._probe_pass()

    def read_missed_gradients(self) -> None:
        """Read the gradients an optimiser will use if no backward pass showed them."""
        if self.armed and (self.replaced() or not self._backward_seen):
            self.after_backward(None)

    def before_update(self, optimizer: Optimizer) -> None:
        """Let probes copy weights that an optimiser is about to move."""
        for probe in self.probes if self.armed else ():
            if implements(probe, BeforeUpdateProbe):
                copy = self.boundary.guarded(probe.name, probe.before_update)
                copy(optimizer, self._collector)

    def after_update(self, optimizer: Optimizer) -> None:
        """Read what an optimiser did to the weights."""
        self._updated = True
        for probe in self.probes if self.armed else ():
            if implements(probe, UpdateProbe):
                read = self.boundary.guarded(probe.name, probe.on_update)
                read(optimizer, self._collector)

    def disarm(self, also: Pending | None = None) -> HostTransfer:
        """Take everything off the model, and send what was measured to the host.

        What is ``also`` waiting on the device comes with the same transfer.
        """
        if not self.armed:
            return Collector().send(also=also)
        self._probe_pass()
        self._note_parts()
        self.coverage.gaps.missing.extend(self._missing())
        self.close()
        parts = self.parts() if self._shared else {}
        facts = PendingFacts(self._facts())
        return self._collector.send(self.coverage.first_heads, also, parts, facts)

    def _facts(self) -> dict[str, Any]:
        """Return the facts of this step, by section."""
        found: dict[str, Any] = {}
        if self.coverage.started:
            self.boundary.guarded("coverage", self._count_layers)(found)

        def state(probe: FactProbe) -> None:
            found[probe.name] = dict(probe.facts())

        for probe in self.probes:
            if implements(probe, FactProbe):
                self.boundary.guarded(probe.name, state)(probe)
        return found

    def _count_layers(self, found: dict[str, Any]) -> None:
        found["coverage"] = {"layers": self.layers.add(self.anatomy, self.coverage)}

    def parts(self) -> dict[str, Parts]:
        """Return what this rank holds of readings that no rank can make alone."""
        parts = {probe.name: probe.parts() for probe in self._sharing()}
        return {name: mine for name, mine in parts.items() if mine}

    def read_parts(self, ranks: Sequence[dict[str, Parts]]) -> Table:
        """Return the readings that all ranks' parts make, the same on every rank."""
        emit = Collector(self.coverage.gaps)
        for probe in self._sharing():
            theirs = [parts.get(probe.name, {}) for parts in ranks]
            if any(theirs):
                self.boundary.guarded(probe.name, probe.on_parts)(theirs, emit)
        return emit.pop()

    def leave_group(self) -> None:
        """Have every probe read for this rank alone from now on."""
        self.late = False
        for probe in self.probes:
            if hasattr(probe, "ranks"):
                probe.ranks = 1

    def _sharing(self) -> list[SharingProbe]:
        return [probe for probe in self.probes if implements(probe, SharingProbe)]

    def close(self) -> None:
        """Take everything off the model."""
        self._stack.close()
        self._batch_capture, self._window, self.armed = None, None, False

    def _note_parts(self) -> None:
        """Note what is not read of parts that ran, and of gradients."""
        if self._window is None or not self._window.opened:
            return
        not_read = self._collector.not_read
        for name, why in parts_not_read(self._window, self.anatomy):
            not_read(name, why)
        if not self._gradients_seen and (self._only_training or self._backward_seen):
            not_read("", NO_GRADIENTS)
        for name in called_as_forward(self._window, self.anatomy):
            if name not in self.coverage.read:
                self.coverage.gaps.unread.setdefault(name, BY_FORWARD)

    def _missing(self) -> Iterator[str]:
        """Yield the families of readings that this step should have brought."""
        trained = self._backward_seen
        by_hand = trained and not self._only_training
        due = {"gradients": trained, "updates": self._updated or by_hand}
        due["gain"] = due["magnitudes"] = bool(self.coverage.read)
        for probe in self.probes if self.opened else ():
            # What takes all ranks comes later, from their exchange.
            exchanged = self._shared and implements(probe, SharingProbe)
            off = exchanged or probe.name in self.boundary.failed
            family = PROMISED.get(probe.name) if not off else None
            absent = family is not None and not self._collector.has(family)
            if absent and due.get(probe.name, True):
                yield PROMISED[probe.name]

    def _probe_pass(self) -> None:
        """Run the stored micro-batch again with the probes attached, once."""
        if self._batch_capture is None or self._batch_capture.batch is None:
            return
        batch, model = self._batch_capture.batch, self.anatomy.model
        self._stack.close()
        self._batch_capture, self._replayed = None, True

        def replay() -> None:
            with self.open():
                batch.replay(model)

        self.boundary.guarded("probe pass", replay)()
