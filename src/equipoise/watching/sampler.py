"""Samples one step: an eager model is read as it runs, a compiled one afterwards."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.sites import Anatomy
from equipoise.probes.capture import (
    Boundary,
    Capture,
    Collector,
    PassCoverage,
    Table,
    attached,
)
from equipoise.probes.protocols import (
    BeforeUpdateProbe,
    GradientProbe,
    Probe,
    SharingProbe,
    StepProbe,
    UpdateProbe,
    is_a,
)
from equipoise.probes.sharding import Parts
from equipoise.probes.window import Window
from equipoise.watching.batch import BatchCapture, compiled_parts
from equipoise.watching.ranks import Ranks

PART_BY_PART = (
    "it is not called as model(...) but part by part: output.logit_* and curvature.*, "
    "which need its output, are not read"
)
BY_FORWARD = (
    "its parts ran and it was not called itself, but as .forward(); beside compiled "
    "code its attention is read only where it is called as module(...)"
)


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
        self.coverage = PassCoverage()
        self._collector = Collector(self.coverage.gaps)
        self._stack = ExitStack()
        self._batch_capture: BatchCapture | None = None
        self._window: Window | None = None
        self.armed = self._replayed = False

    def begin(self, ranks: Ranks) -> None:
        """Let probes ask the other ranks, all of which are here, outside any pass."""
        if ranks.count == 1:
            return
        numbers = [0]

        def begin(probe: SharingProbe) -> None:
            numbers.append(probe.begin(self.anatomy))

        for probe in self._sharing():
            self.boundary.guarded(probe.name, begin)(probe)
        ranks.reserve(4 * sum(numbers))

    def arm(self, step: int) -> None:
        """Wait for the next forward pass, of this step."""
        for probe in self.probes:
            if is_a(probe, StepProbe):
                probe.begin_step(step)
        self.coverage, self.armed, self._replayed = PassCoverage(), True, False
        self._collector = Collector(self.coverage.gaps)
        if compiled_parts(self.anatomy.model):
            capture = BatchCapture(
                self.anatomy.model, only_training=self._only_training
            )
            self._stack.enter_context(capture.installed())
            self._batch_capture = capture
            return
        window = attached(
            *self._probed, only_training=self._only_training, **self._reported
        )
        self._window = self._stack.enter_context(window)

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
        for probe in self.probes:
            if is_a(probe, GradientProbe):
                read = self.boundary.guarded(probe.name, probe.on_gradients)
                read(self.anatomy, self._collector, scale=scale)
        self._probe_pass()

    def before_update(self, optimizer: Optimizer) -> None:
        """Let probes copy weights that an optimiser is about to move."""
        for probe in self.probes if self.armed else ():
            if is_a(probe, BeforeUpdateProbe):
                copy = self.boundary.guarded(probe.name, probe.before_update)
                copy(optimizer, self._collector)

    def after_update(self, optimizer: Optimizer) -> None:
        """Read what an optimiser did to the weights."""
        for probe in self.probes if self.armed else ():
            if is_a(probe, UpdateProbe):
                read = self.boundary.guarded(probe.name, probe.on_update)
                read(optimizer, self._collector)

    def disarm(self) -> Table:
        """Take everything off the model, and return what was measured."""
        if not self.armed:
            return {}
        self._probe_pass()
        self._note_parts()
        self.close()
        return self._collector.pop(self.coverage.first_heads)

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

    def separate(self) -> None:
        """Have every probe read for this rank alone from now on."""
        for probe in self.probes:
            if hasattr(probe, "ranks"):
                probe.ranks = 1

    def _sharing(self) -> list[SharingProbe]:
        return [probe for probe in self.probes if is_a(probe, SharingProbe)]

    def close(self) -> None:
        """Take everything off the model."""
        self._stack.close()
        self._batch_capture, self._window, self.armed = None, None, False

    def _note_parts(self) -> None:
        """Note what is not read of a model that is called part by part."""
        if self._window is None or not self._window.opened:
            return
        called = self._window.called
        if not self._window.model_called:
            self._collector.not_read("", PART_BY_PART)
        for site in self.anatomy.attention:
            if type(site.module).forward is nn.Module.forward:
                continue  # a ModuleDict: it cannot be called, only its parts can
            inside = any(id(module) in called for module in site.module.modules())
            if inside and id(site.module) not in called:
                if site.name not in self.coverage.read:
                    self.coverage.gaps.unread.setdefault(site.name, BY_FORWARD)

    def _probe_pass(self) -> None:
        """Run the stored micro-batch again with the probes attached, once."""
        if self._batch_capture is None or self._batch_capture.batch is None:
            return
        batch, model = self._batch_capture.batch, self.anatomy.model
        self._stack.close()
        self._batch_capture, self._replayed = None, True

        def replay() -> None:
            with Capture(*self._probed, **self._reported).open():
                batch.replay(model)

        self.boundary.guarded("probe pass", replay)()
