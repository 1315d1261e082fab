"""One sampled step: an eager model is measured as it runs, a compiled one after."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from equipoise.anatomy.sites import Anatomy
from equipoise.probes.capture import (
    Boundary,
    GradientProbe,
    Heard,
    Probe,
    SharingProbe,
    UpdateProbe,
    attached,
    listening,
)
from equipoise.probes.sharding import Parts
from equipoise.watching import loop_hooks as tracing
from equipoise.watching.batch import Holder, compiled_parts
from equipoise.watching.ranks import Ranks
from equipoise.watching.step_readings import Collector, Table


class Sampler:
    """Puts probes on for a step and takes them off; holds what they said."""

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
        self._collector = Collector()
        self._stack = ExitStack()
        self._holder: Holder | None = None
        self.heard = Heard()
        self.armed = self._was_traced = self._frozen = False
        tracing.listens(self, id(self))
        self._opened: Callable[[], bool] = bool

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

    def arm(self) -> None:
        """Wait for the next forward pass."""
        if self._frozen:
            return
        self.heard, self.armed, self._was_traced = Heard(), True, False
        if compiled_parts(self.anatomy.model):
            holder = Holder(self.anatomy.model, only_training=self._only_training)
            self._stack.enter_context(holder.installed())
            self._holder = holder
            self._opened = lambda: holder.batch is not None
            return
        window = attached(
            self.probes,
            self.anatomy,
            self._collector,
            boundary=self.boundary,
            only_training=self._only_training,
            heard=self.heard,
            traced=partial(tracing.tell, id(self)),
        )
        opened = self._stack.enter_context(window)
        self._opened = lambda: opened.opened

    @property
    def opened(self) -> bool:
        """Whether a forward pass of the step was seen."""
        return self._opened()

    def traced(self) -> None:
        """Learn that compiled code is going to call the model without us."""
        self._was_traced = True

    def passed_by(self) -> bool:
        """Say, once, whether compiled code called the model this step waited for.

        Then wait no more, and leave the doors on: compiled code knows them, and would
        be compiled again without them.
        """
        passed = self.armed and self._was_traced and not self.opened
        if passed:
            self.armed, self._frozen = False, True
        return passed

    def after_backward(self, scale: Tensor | None) -> None:
        """Read gradients while they are whole, and what compiled code kept from us."""
        if not self.armed:
            return
        for probe in self.probes:
            if isinstance(probe, GradientProbe):
                look = self.boundary.guarded(probe.name, probe.on_gradients)
                look(self.anatomy, self._collector, scale=scale)
        self._probe_pass()

    def after_update(self, optimizer: Optimizer) -> None:
        """Read what the optimiser did to the weights."""
        for probe in self.probes if self.armed else ():
            if isinstance(probe, UpdateProbe):
                look = self.boundary.guarded(probe.name, probe.on_update)
                look(optimizer, self._collector)

    def disarm(self) -> Table:
        """Take everything off the model, and return what was measured."""
        if not self.armed:
            return {}
        self._probe_pass()
        self.close()
        return self._collector.taken(self.heard.first_heads)

    def parts(self) -> dict[str, Parts]:
        """Return what this rank holds of readings that no rank can make alone."""
        held = {probe.name: probe.parts() for probe in self._sharing()}
        return {name: parts for name, parts in held.items() if parts}

    def together(self, ranks: Sequence[dict[str, Parts]]) -> Table:
        """Return the readings that all ranks' parts make, the same on every rank."""
        emit = Collector()
        for probe in self._sharing():
            theirs = [parts.get(probe.name, {}) for parts in ranks]
            if any(theirs):
                self.boundary.guarded(probe.name, probe.on_parts)(theirs, emit)
        return emit.taken()

    def _sharing(self) -> list[SharingProbe]:
        return [probe for probe in self.probes if isinstance(probe, SharingProbe)]

    def close(self) -> None:
        """Take everything off the model."""
        self._stack.close()
        self._holder, self.armed = None, False

    def _probe_pass(self) -> None:
        """Run the held micro-batch again with the probes on, once."""
        if self._holder is None or self._holder.batch is None:
            return
        batch, model = self._holder.batch, self.anatomy.model
        self._stack.close()
        self._holder = None

        def replay() -> None:
            with listening(
                self.probes,
                self.anatomy,
                self._collector,
                boundary=self.boundary,
                heard=self.heard,
            ):
                batch.replay(model)

        self.boundary.guarded("probe pass", replay)()
