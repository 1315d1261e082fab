"""The handle of a watched model: counts steps, samples some, records all."""

import atexit
import os
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from equipoise.anatomy.sites import Anatomy
from equipoise.judging.card import Card
from equipoise.judging.judge import Judge
from equipoise.judging.verdict import Verdict
from equipoise.probes.capture import Boundary, Collector
from equipoise.probes.protocols import Probe
from equipoise.probes.window import from_compiled_code
from equipoise.records import Finding
from equipoise.text.card import worded as worded_card
from equipoise.text.verdict_text import worded
from equipoise.watching.autopilot_bridge import AutopilotBridge
from equipoise.watching.findings import (
    LATE_OPTIMIZER,
    MODULES_CHANGED,
    OTHER_BATCHES,
    OTHER_OPTIMIZER,
)
from equipoise.watching.loop import torch_events
from equipoise.watching.loop.optimizers import (
    Relations,
    Round,
    is_stepping,
    successors,
)
from equipoise.watching.options import WatchOptions, one_number_each
from equipoise.watching.ranks.group import Ranks
from equipoise.watching.step import coverage, pipeline
from equipoise.watching.step.batch import StoredBatch
from equipoise.watching.step.losses import LossCollector
from equipoise.watching.step.measure import Sampler
from equipoise.watching.step.nonfinite import NonfiniteMonitor
from equipoise.watching.step.schedule import Meter, Schedule

if TYPE_CHECKING:
    from equipoise.autopilot.pilot import Pilot


class Watch:
    """Watches one model until closed; also a context manager.

    A step ends at ``optimizer.step()`` when an optimiser was given, when all have
    stepped that were given, and at ``.step()`` otherwise. Hooks exist during a sampled
    forward pass only; before it each module has a stand-in for its call. Off-sample the
    model runs as if it were not watched.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        probes: Sequence[Probe],
        writer: pipeline.StepWriter,
        *,
        path: Path,
        optimizers: Sequence[Optimizer],
        options: WatchOptions,
        ranks: Ranks,
        judge: Judge,
        step: int = 0,
    ) -> None:
        self.anatomy, self.options, self.path = anatomy, options, path
        self.closed, self.first_rank = False, ranks.rank == 0
        self._round = Round(optimizers)
        self._schedule = Schedule(
            every=options.every,
            at=options.at,
            dense_start=options.dense_start,
            budget=options.budget,
            step=step,
        )
        self._meter, self._stored = Meter(), StoredBatch(anatomy.model)
        self._boundary = Boundary(strict=options.strict, around=self._meter.running)
        self._guarded = partial(self._boundary.guarded, "watch")
        training = {"only_training": bool(optimizers)}
        self._sampler = Sampler(anatomy, probes, boundary=self._boundary, **training)
        self._losses = LossCollector(anatomy.model, optimizers)
        self._nonfinite = NonfiniteMonitor(anatomy.model, rank=ranks.rank, keep=path)
        self._coverage = coverage.CoverageCheck(anatomy, strict=options.strict)
        self.reporter = pipeline.Reporter(
            options.on_finding, first_rank=self.first_rank, quiet=options.quiet
        )
        self._recorder = pipeline.Recorder(
            writer, ranks, self._schedule, list(anatomy.blocks), judge
        )
        self._recorder.checker.expected = options.expected
        self._nonfinite.stored = self._stored.get
        self._sampler.replaced = self._losses.gradients_replaced
        self._actions = AutopilotBridge(
            self._recorder, self._sampler, options.autopilot, stored=self._stored.get
        )
        self._step_ended = list[Callable[[int, bool], Any]]()
        self._scaled = self._step_seen = self._updating = self._stop = False
        self._number, self._other = id(self), 0
        self._relations = Relations(anatomy.model)
        torch_events.on_tracing(self, self._number)
        self._off, self._stack = ExitStack(), ExitStack()  # the first at any moment
        self._attach()
        self._guarded(self._sampler.begin)(ranks, acts=self.autopilot is not None)
        self._arm()

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimisers whose steps count: one that takes over takes a place here."""
        return self._round.optimizers

    @property
    def optimizer(self) -> Optimizer | None:
        """The first of the optimisers, if any was given."""
        return self.optimizers[0] if self.optimizers else None

    @property
    def current_step(self) -> int:
        """The step under way, counted from 0 over the whole run."""
        return self._schedule.step

    @property
    def sampling(self) -> bool:
        """Whether the step under way is one that is measured."""
        return self._sampler.armed

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything found so far."""
        self._flush()
        return tuple(self.reporter.findings)

    @property
    def verdict(self) -> Verdict:
        """What is the matter with the run so far; the same on every rank."""
        self._flush()
        return worded(self._recorder.judge.verdict)

    @property
    def card(self) -> Card:
        """What the loop was seen to do so far; the same on every rank."""
        self._flush()
        return worded_card(self._recorder.card)

    @property
    def autopilot(self) -> "Pilot | None":
        """The autopilot with its log; None if none was asked for."""
        return self._actions.pilot

    @property
    def should_stop(self) -> bool:
        """Whether a rule or state of ``stop_on`` has come true; it stays true."""
        if self.options.stop_on:
            self._flush()
        self._stop = self._stop or self._recorder.judge.shows(self.options.stop_on)
        return self._stop

    def on_step_end(self, callback: Callable[[int, bool], Any]) -> None:
        """Have ``callback(step, sampled)`` called whenever a step has ended."""
        self._step_ended.append(callback)

    def step(self, *, loss: Tensor | float | None = None, **scalars: float) -> None:
        """Add real numbers to the step that ends; without an optimiser, also end it."""
        named = one_number_each(scalars if loss is None else {"loss": loss} | scalars)
        self._coverage.loss_known |= loss is not None
        # With an optimiser, its hook has already ended the step these belong to.
        late = self.optimizer is not None and self._schedule.step > 0
        for name, value in named.items():
            self._recorder.scalars.add(self._schedule.step - late, name, value)
        if self.optimizer is None:
            self._end_step(loss_given=loss is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must carry for sampling to go on in phase.

        Scalars not yet in the run file are part of it: each rank keeps its own state.
        """
        self._flush()
        state = {**self._schedule.state_dict(), **self._actions.state_dict()}
        return {**state, "pending": self._recorder.pending()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint stood: the same step number, the same phase."""
        self._flush()
        self._schedule.load_state_dict(state)
        self._sampler.close()
        self._recorder.restore(state.get("pending", ()))
        self._actions.load_state_dict(state, self.optimizer)
        self._arm()

    def continue_at(self, step: int, state: dict[str, Any] | None = None) -> None:
        """Give the step under way the number it has in a trainer that was resumed.

        ``state`` is the ``state_dict`` of a checkpoint, used if it is of this step.
        """
        if state and state.get("step") == step:
            self.load_state_dict(state)
            return
        self._sampler.close()
        self._schedule.continue_at(step)
        self._arm()

    def close(self, *, orderly: bool = True) -> None:
        """Take every hook and patch off, and leave one finished file."""
        if self.closed:
            return
        self.closed = True
        self._stack.close()
        self._recorder.add_findings(self._nonfinite.pop())
        if self._losses.unseen_step(self.optimizers) and not self._step_seen:
            self._recorder.add_findings(self._coverage.no_step(self.current_step))
        self._guarded(self._finish)(orderly)
        self.reporter.print_card(self._recorder.card, closing=True)
        line = self.reporter.summary(self.current_step, self.verdict)
        self.reporter.print_line(f"{line}; equipoise report {self.path}")

    __repr__ = coverage.describe_watch
    _repr_html_ = coverage.watch_html

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        # The rank that raises may be the only one: wait for no other.
        self.close(orderly=not any(raised))

    # Called by the loop hooks, in the order of a training step.

    def before_backward(self, loss: Tensor | None, roots: Sequence[Tensor]) -> None:
        self._updating = self._still_updating()
        with self._meter.running():
            cleared = self._losses.before_backward(loss, in_closure=self._updating)
            self._guarded(self._nonfinite.check_loss)(self._schedule.step, loss, roots)
            self._guarded(self._sampler.before_backward)()
        if self.sampling and not self._sampler.opened:
            self._coverage.compiled |= any(map(from_compiled_code, roots))
        if self._losses.weights_moved and not (self._updating or self._step_seen):
            self._report_now(self._coverage.moved_unseen(self._schedule.step))
        if cleared and self._other and not self._updating:
            self._note(OTHER_BATCHES)

    def _still_updating(self) -> bool:
        return self._updating and is_stepping(self.optimizers)

    def after_backward(self, loss: Tensor | None, scale: Tensor | None) -> None:
        self._scaled = scale is not None
        if self._losses.after_backward(loss) or not self._losses.ever_reached_model:
            self._guarded(self._sampler.after_backward)(scale)

    def _renew(self, anatomy: Anatomy) -> None:
        """Follow a model whose modules are no longer those that were watched."""
        if anatomy is not self.anatomy:
            self.anatomy = self._coverage.anatomy = anatomy
            self._recorder.blocks[:] = anatomy.blocks
            self._losses.mark(anatomy.model)
            self._note(MODULES_CHANGED)

    def before_clipping(self, part: Tensor, parameters: object) -> None:
        norm = self._losses.clipped(part, parameters, self.optimizers)
        if norm is None:
            return
        with self._meter.running():
            step, ranks = self._schedule.step, self._recorder.ranks.count
            norm = self._recorder.scalars.add_norm(step, norm, ranks=ranks)
            self._guarded(self._nonfinite.check_norm)(step, norm, scaled=self._scaled)
            self._guarded(self._sampler.read_missed_gradients)()

    def after_scaler_update(self, asked: Collection[int]) -> None:
        """After an overflow a scaler leaves the optimiser out: the step is over."""
        used = self._losses.reached_model or self._round.begun
        if self.optimizer is not None and used and self._round.skipped(asked):
            self._end_step()

    def before_update(self, optimizer: Optimizer, *, closure: bool) -> None:
        counted = self._counts(optimizer)
        own = self._relations.begin(optimizer, self.optimizers, self.current_step)
        self._updating = counted or self._still_updating()
        # In a closure, and inside a backward pass, gradients are still to come.
        if counted and not (closure or torch_events.inside_backward()):
            self._guarded(self._sampler.read_missed_gradients)()
        if self.sampling and own and (counted or not self._losses.step_is_over):
            self._guarded(self._sampler.before_update)(optimizer)
        if counted and self.autopilot is not None:
            self._guarded(self._actions.before_update)(optimizer)

    def after_update(self, optimizer: Optimizer) -> None:
        """Follow the parameters: another optimiser may have taken over."""
        if self.optimizer is None or self.closed:
            return
        if self._counts(optimizer):
            if self.autopilot is not None:  # its hooks have run: remedies may add some
                self._guarded(self._actions.act)(optimizer)
            return
        relation = self._relations.end(optimizer, self.optimizers, self.current_step)
        # A wrapper (Lookahead) and the optimiser inside it take one step together.
        if self._updating or relation in ("another model", "wrapper"):
            return
        again, self._other = self._other == id(optimizer), id(optimizer)
        if relation == "same parameters" or again:
            self._note(OTHER_OPTIMIZER)
            self._follow(successors(self.optimizers, optimizer))
            self._after_optimizer(optimizer, (), {})
        elif self._losses.step_is_over:
            self._note(LATE_OPTIMIZER)
        else:
            self._guarded(self._sampler.after_update)(optimizer)

    def _counts(self, optimizer: Optimizer) -> bool:
        """Return whether the steps of this optimiser count."""
        return any(optimizer is one for one in self.optimizers)

    def _follow(self, counted: Sequence[Optimizer]) -> None:
        """Count the steps of these optimisers from now on."""
        self._round, self._other = Round(counted), 0
        self._relations.follow(counted, self._after_optimizer)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            torch_events.notify_tracing(self._number)
            return
        if self.closed:
            return
        self._updating, self._other, self._step_seen = False, 0, True
        number = self.optimizers.index(optimizer)
        self._recorder.add_settings(self._schedule.step, optimizer, number)
        self._guarded(self._sampler.after_update)(optimizer)
        if len(self.optimizers) > 1:
            self._losses.note_phase(optimizer)
        if self._round.over(optimizer):
            self._end_step()

    def traced(self) -> None:
        """Report at once that the step which is being compiled will not be seen."""
        self._report_now(
            [] if self.closed else self._coverage.no_step(self.current_step)
        )

    def _note(self, code: str) -> None:
        self._report_now(self._coverage.once(self._schedule.step, code))

    def _report_now(self, findings: list[Finding]) -> None:
        self._recorder.add_findings(self.reporter.report(findings))

    def _attach(self) -> None:
        self._off.enter_context(torch_events.listening_to_loop(self))
        self._off.enter_context(self._actions.recorded())
        self._off.callback(self._sampler.close)
        self._off.callback(self._stored.close)
        self._stack.callback(self._off.close)
        self._stack.callback(self._relations.close)
        self._follow(self.optimizers)
        close = partial(pipeline.close_handle, weakref.ref(self))
        atexit.register(close)
        self._stack.callback(atexit.unregister, close)
        # A dropped handle is collected with its model and optimiser.
        end = weakref.finalize(self, pipeline.write_rest, self._recorder, os.getpid())
        self._stack.callback(end.detach)

    def _arm(self) -> None:
        if self._schedule.due and not self.closed:
            self._guarded(self._sampler.arm)(self._schedule.step)
        if self.options.hold_batch and not self.closed:
            self._guarded(self._stored.renew)(self.optimizer is not None)

    def _end_step(self, *, loss_given: bool = False) -> None:
        self._renew(self._sampler.anatomy)
        self._round.begin()
        step, sampled, self._step_seen = self.current_step, self.sampling, True
        loss, reached_model, partial_loss = self._losses.pop()
        seen, add = self._sampler.coverage, self._recorder.add_findings
        if loss is not None and not loss_given:
            self._recorder.scalars.add(step, "loss", loss)
        if self.optimizer is not None:
            add(self._coverage.check_loss(step, loss, partial_loss))
        no_pass = reached_model and not self._sampler.opened
        add(self._nonfinite.pop())
        if sampled and no_pass:
            add(self._coverage.check(step, seen, no_pass=no_pass))
        findings: list[Finding] = []
        self._guarded(self._record)(step, sampled, findings)
        self._meter.end_step(sampled=sampled)
        self._schedule.advance()
        if "watch" in self._boundary.failed:
            self._detach_after_failure()
        self._arm()
        self.reporter.report(findings)  # what a user's callback raises reaches the user
        for callback in self._step_ended:
            callback(step, sampled)
        if sampled and not no_pass:
            add(self._coverage.check(step, seen, no_pass=no_pass))

    def _record(self, step: int, sampled: bool, findings: list[Finding]) -> None:
        """Send a sampled step to the host; write what is there, the last one surely."""
        recorder = self._recorder
        if sampled:
            self._write_arrived(findings, wait=True)
            recorder.send(step, self._sampler.disarm(recorder.scalars))
        elif recorder.flush_due and recorder.moving is None:
            recorder.send(None, Collector().send(also=recorder.scalars))
        # Ranks write a step together, and an autopilot acts on it: both wait for it.
        together = recorder.ranks.count > 1 or self.autopilot is not None
        if not (sampled and self._sampler.late):
            self._write_arrived(findings, wait=together)

    def _write_arrived(self, findings: list[Finding], *, wait: bool) -> None:
        """Write what was sent; what all ranks found in it goes into ``findings``."""
        moving, check = self._recorder.moving, self._nonfinite.check_late
        if moving is None or not (wait or moving.readings.arrived):
            return
        self._recorder.cleared = self._losses.cleared
        findings += self._recorder.write_arrived(check, self._meter, self._sampler)
        self.reporter.print_card(self._recorder.card)
        if moving.step is not None:
            self._nonfinite.note_other_ranks(findings)
            if self.autopilot is not None:
                self._actions.consider(self.optimizer)

    def _flush(self, *, closing: bool = False) -> None:
        """Write what is still on its way, unless other ranks would have to as well."""
        if self._recorder.moving and (closing or not self._sampler.late):
            findings: list[Finding] = []
            self._guarded(self._write_arrived)(findings, wait=True)
            self.reporter.report(findings)

    def _finish(self, orderly: bool) -> None:
        self._flush(closing=orderly)
        self._recorder.look_at_pending(self._nonfinite.check_late)
        self.reporter.report(self._recorder.close(orderly=orderly))

    def _detach_after_failure(self) -> None:
        """Something of ours failed: detach, and let the training go on."""
        self.closed = True
        self._off.close()
        self._recorder.add_failures(self._schedule.step - 1, self._boundary)
        self._boundary.guarded("shutdown", self._finish)(False)
