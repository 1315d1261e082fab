"""The handle of a watched model: counts steps, samples some, records all."""

import atexit
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor
from torch.optim import Optimizer

from equipoise.anatomy.hooks import inside_torch_func
from equipoise.anatomy.sites import Anatomy
from equipoise.judging.card import Card
from equipoise.judging.judge import Judge
from equipoise.judging.verdict import Verdict
from equipoise.probes.capture import Boundary, Collector, PassCoverage
from equipoise.probes.loop_events import LoopEvent
from equipoise.probes.protocols import Probe
from equipoise.probes.window import from_compiled_code
from equipoise.records import Finding, html_table
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
from equipoise.watching.loop.observer import LoopObserver
from equipoise.watching.options import WatchOptions, one_number_each
from equipoise.watching.ranks.group import Ranks
from equipoise.watching.step import pipeline
from equipoise.watching.step.batch import HeldBatch
from equipoise.watching.step.coverage import CoverageCheck
from equipoise.watching.step.machine import (
    USERS_CODE,
    Begin,
    Closed,
    Effect,
    Event,
    Failed,
    Step,
    transition,
)
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
        self._step = Step(number=step)
        self._schedule = Schedule(
            every=options.every,
            at=options.at,
            dense_start=options.dense_start,
            budget=options.budget,
            step=step,
        )
        self._meter, self._stored = Meter(), HeldBatch(anatomy.model)
        self._boundary = Boundary(strict=options.strict, around=self._meter.running)
        self._guarded = partial(self._boundary.guarded, "watch")
        self._observer = LoopObserver(
            anatomy.model,
            optimizers,
            # Strong: the optimiser's own hook keeps the observer, and so a handle that
            # nobody kept lives as long as the optimiser, and goes with it.
            notice=self._notice,
            step=self._now,
            tracing=id(self),
            count=self._count,
        )
        self._sampler = Sampler(
            anatomy,
            probes,
            boundary=self._boundary,
            only_training=bool(optimizers),
            notice=_weakly(self._notice_forward),
        )
        self._nonfinite = NonfiniteMonitor(
            anatomy.model, rank=ranks.rank, keep=path, stored=self._stored.get
        )
        self._coverage = CoverageCheck(anatomy, strict=options.strict)
        self.reporter = pipeline.Reporter(
            options.on_finding, first_rank=ranks.rank == 0, quiet=options.quiet
        )
        self._recorder = pipeline.Recorder(
            writer, ranks, self._schedule, list(anatomy.blocks), judge
        )
        self._recorder.checker.expected = options.expected
        self._actions = AutopilotBridge(
            self._recorder,
            self._sampler,
            options.autopilot,
            stored=self._stored.get,
            folder=path.parent,
        )
        self._step_ended = list[Callable[[int, bool], Any]]()
        self._stop = False
        torch_events.on_tracing(self, id(self))
        self._off, self._stack = ExitStack(), ExitStack()  # the first at any moment
        self._attach()
        self._guarded(self._sampler.begin)(ranks, acts=self.autopilot is not None)
        self._notice(self._next_step)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimisers whose steps count: one that takes over takes a place here."""
        return self._observer.optimizers

    @property
    def optimizer(self) -> Optimizer | None:
        """The first of the optimisers, if any was given."""
        return self.optimizers[0] if self.optimizers else None

    @property
    def closed(self) -> bool:
        """Whether the loop is not followed any more."""
        return not self._step.live

    @property
    def first_rank(self) -> bool:
        """Whether this is the rank that writes."""
        return self._recorder.ranks.rank == 0

    @property
    def current_step(self) -> int:
        """The step under way, counted from 0 over the whole run."""
        return self._step.number

    @property
    def sampling(self) -> bool:
        """Whether the step under way is one that is measured."""
        return self._step.sampled and self._step.live

    # Queries: they return what is known; they write no file and make no callback.

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything found so far."""
        return tuple(self.reporter.findings)

    @property
    def verdict(self) -> Verdict:
        """What is the matter with the run up to its ``step``; the same on every rank.

        :meth:`flush` brings it up to date where a sample is still on its way.
        """
        return worded(self._recorder.judge.verdict)

    @property
    def card(self) -> Card:
        """What the loop was seen to do so far; the same on every rank."""
        return worded_card(self._recorder.card)

    @property
    def autopilot(self) -> "Pilot | None":
        """The autopilot with its log; None if none was asked for."""
        return self._actions.pilot

    @property
    def sampling_share(self) -> float | None:
        """The share of the training's time that sampling takes, from recent steps."""
        cost, plain = self._meter.cost, self._meter.plain
        if cost is None or not plain:
            return None
        return cost / (cost + self._schedule.interval * plain)

    @property
    def should_stop(self) -> bool:
        """Whether a rule or state of ``stop_on`` has come true; it stays true.

        It may lag one sample behind, where samples arrive late.
        """
        return self._stop

    def __repr__(self) -> str:
        state = "closed" if self.closed else "watching"
        found = f"step {self.current_step}, {self.verdict.state}"
        return f"Watch({self.anatomy.family}, {state}, {found}, {str(self.path)!r})"

    def _repr_html_(self) -> str:
        verdict = self.verdict
        rows = [
            ("state", "closed" if self.closed else "watching"),
            ("steps", self.current_step),
            ("verdict", f"{verdict.state}: {verdict.headline}"),
            ("try", verdict.advice),
            ("findings", len(self.findings)),
            ("file", self.path),
        ]
        return html_table(self.anatomy.family, [row for row in rows if row[1] != ""])

    # Verbs.

    def flush(self) -> None:
        """Write the sample that is still on its way, and report what is found in it.

        Where devices of several ranks exchange late it stays on its way: all ranks
        would have to ask for it.
        """
        if not self._sampler.late:
            self._guarded(self._write_arrived)(wait=True)
        self.reporter.tell()

    def on_step_end(self, callback: Callable[[int, bool], Any]) -> None:
        """Have ``callback(step, sampled)`` called whenever a step has ended."""
        self._step_ended.append(callback)

    def step(self, *, loss: Tensor | float | None = None, **scalars: float) -> None:
        """Add real numbers to the step that ends; without an optimiser, also end it."""
        named = one_number_each(scalars if loss is None else {"loss": loss} | scalars)
        if loss is not None:
            self._coverage.known.add("loss")
        # With an optimiser, its hook has already ended the step these belong to.
        late = bool(self.optimizers) and self.current_step > 0
        for name, value in named.items():
            self._recorder.scalars.add(self.current_step - late, name, value)
        self._notice(self._observer.step_called, loss is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must carry for sampling to go on in phase.

        Scalars not yet in the run file are part of it: each rank keeps its own state.
        """
        self.flush()
        state = {**self._schedule.state_dict(), **self._actions.state_dict()}
        return {**state, "pending": self._recorder.fetch_pending()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint stood: the same step number, the same phase."""
        self.flush()
        self._schedule.load_state_dict(state)
        self._recorder.restore(state.get("pending", ()))
        self._actions.load_state_dict(state, self.optimizer)
        self._notice(self._next_step)

    def continue_at(self, step: int, state: dict[str, Any] | None = None) -> None:
        """Give the step under way the number it has in a trainer that was resumed.

        ``state`` is the ``state_dict`` of a checkpoint, used if it is of this step.
        """
        if state and state.get("step") == step:
            self.load_state_dict(state)
            return
        self._schedule.continue_at(step)
        self._notice(self._next_step)

    def close(self, *, orderly: bool = True) -> None:
        """Take every hook and patch off, and leave one finished file."""
        later = list[Pending]()
        try:
            self._take(Closed, (orderly,), later)
        finally:
            self._call_user(later)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        # The rank that raises may be the only one: wait for no other.
        self.close(orderly=not any(raised))

    # The machine, and the one function that carries its effects out.

    def _now(self) -> Step:
        return self._step

    def _count(self, event: LoopEvent) -> None:
        if self._step.live:
            self._sampler.on_loop(event)

    def _notice(self, observe: Callable[..., Event | None], *given: Any) -> None:
        """Look at the loop, and do what follows; nothing of ours reaches the loop."""
        later, number = list[Pending](), self._step.number
        try:
            self._guarded(self._take)(observe, given, later)
            if "watch" in self._boundary.failed and self._step.live:
                leave = self._boundary.guarded("shutdown", self._take)
                leave(Failed, (number,), later)
        finally:
            self._call_user(later)

    def _notice_forward(self, event: Event) -> None:
        """Take an event of the window; inside torch.func, where gaps are noted, too."""
        if inside_torch_func():
            self._take(lambda: event, (), [])
        else:
            self._notice(lambda: event)

    def _take(
        self,
        observe: Callable[..., Event | None],
        given: Sequence[Any],
        later: "list[Pending]",
    ) -> None:
        """Carry out what an event asks for, in order; the user is called ``later``.

        An effect that raises leaves none of the others undone.
        """
        event = observe(*given)
        if event is None:
            return
        self._step, effects = transition(self._step, event)
        step, raised = self._step, list[BaseException]()
        for effect in effects:
            if effect in USERS_CODE:
                later.append((effect, step, event))
                continue
            try:
                CARRIED_OUT[effect](self, step, event)
            except BaseException as error:
                raised.append(error)
        if raised:
            raise raised[0]

    def _call_user(self, later: "list[Pending]") -> None:
        for effect, step, event in later:
            CARRIED_OUT[effect](self, step, event)

    def traced(self) -> None:
        """Report at once that the step which is being compiled will not be seen."""
        if not self.closed:
            self._note(self._coverage.no_step(self.current_step))
            self.reporter.tell()

    def _attach(self) -> None:
        self._off.enter_context(torch_events.listening_to_loop(self._observer))
        self._off.enter_context(self._actions.recorded())
        self._off.callback(self._sampler.drop)
        self._off.callback(self._stored.close)
        self._stack.callback(self._off.close)
        self._stack.callback(self._observer.close)
        close = partial(pipeline.close_handle, weakref.ref(self))
        atexit.register(close)
        self._stack.callback(atexit.unregister, close)
        # A dropped handle is collected with its model and optimiser.
        end = weakref.finalize(self, pipeline.write_rest, self._recorder, os.getpid())
        self._stack.callback(end.detach)

    # Effects.

    def _next_step(self) -> Begin:
        number = self._schedule.step
        if not self._schedule.due:
            return Begin(number)
        return Begin(number, PassCoverage(), self._sampler.source)

    def _store_batch(self) -> None:
        if self.options.hold_batch:
            self._stored.renew(bool(self.optimizers))

    def _seek_compiled(self, step: Step, roots: Sequence[Tensor]) -> None:
        if any(map(from_compiled_code, roots)):
            self._coverage.known.add("compiled code")

    def _check_norm(self, step: Step, event: Any) -> None:
        norms = [norm for _, norm in step.norms]
        whole = event.parameters is not None and len(norms) > 1
        norm = torch_events.joined_norm(norms) if whole else event.norm
        ranks, scaled = self._recorder.ranks.count, step.scale is not None
        norm = self._recorder.scalars.add_norm(step.number, norm, ranks=ranks)
        self._nonfinite.check_norm(step.number, norm, scaled=scaled)

    def _add_rate(self, step: Step, optimizer: Optimizer) -> None:
        number = [one is optimizer for one in self.optimizers].index(True)
        self._recorder.add_settings(step.number, optimizer, number)

    def _follow_optimizer(self, step: Step, optimizer: Optimizer) -> None:
        self._note(self._coverage.once(step.number, OTHER_OPTIMIZER))
        self._observer.take_over(optimizer)

    def _add_loss(self, step: Step) -> None:
        """Add the step's loss, and what was seen of it."""
        self._recorder.add_findings(self._nonfinite.pop())
        loss, partial_loss = step.losses.total, step.losses.partial
        if loss is not None:
            self._recorder.scalars.add(step.number, "loss", loss)
        if self.optimizers:
            check = self._coverage.check_loss
            self._recorder.add_findings(check(step.number, loss, partial_loss))

    def _finish(self, step: Step) -> None:
        """Send a sampled step to the host; the last one is surely written before."""
        recorder = self._recorder
        if step.sampled:
            self._follow_modules(step)
            self._write_arrived(wait=True)
            sent = self._sampler.finish(step, recorder.scalars)
            recorder.send(step.number, sent)
        elif recorder.flush_due and recorder.moving is None:
            recorder.send(None, Collector().send(also=recorder.scalars))

    def _follow_modules(self, step: Step) -> None:
        """Follow a model whose modules are no longer those that were watched."""
        anatomy = self._sampler.anatomy
        if anatomy is not self.anatomy:
            self.anatomy = self._coverage.anatomy = anatomy
            self._recorder.blocks[:] = anatomy.blocks
            self._observer.marks.follow(anatomy.model)
            self._note(self._coverage.once(step.number, MODULES_CHANGED))

    def _check_coverage(self, step: Step) -> None:
        if step.coverage is None:
            return
        reached = step.reached == "yes" or len(step.stepped) > 1
        found = self._coverage.check(
            step.number, step.coverage, no_pass=reached and not step.passes
        )
        self._recorder.add_findings(found)

    def _write(self, step: Step) -> None:
        """Write what is there."""
        # Ranks write a step together, and an autopilot acts on it: both wait for it.
        together = self._recorder.ranks.count > 1 or self.autopilot is not None
        if not (step.sampled and self._sampler.late):
            self._write_arrived(wait=together)

    def _write_arrived(self, *, wait: bool) -> None:
        """Write what was sent, and take what all ranks found in it."""
        moving, check = self._recorder.moving, self._nonfinite.check_late
        if moving is None or not (wait or moving.readings.arrived):
            return
        self._recorder.cleared = self._step.cleared
        found = self._recorder.write_arrived(check, self._meter, self._sampler)
        self.reporter.print_card(self._recorder.card)
        if moving.step is not None:
            self._nonfinite.note_other_ranks(found)
            if self.autopilot is not None:
                self._actions.consider(self.optimizer)
        self._found(found)

    def _found(self, findings: Sequence[Finding]) -> None:
        self.reporter.take(findings)
        self._stop = self._stop or self._recorder.judge.shows(self.options.stop_on)

    def _advance(self, step: Step) -> None:
        self._meter.end_step(sampled=step.sampled)
        self._schedule.advance()
        self._take(self._next_step, (), [])

    def _snapshot(self, optimizer: Optimizer) -> None:
        if self.autopilot is not None:
            self._actions.before_update(optimizer)

    def _act(self, optimizer: Optimizer) -> None:
        if self.autopilot is not None:
            self._actions.act(optimizer)

    def _write_rest(self, orderly: bool) -> None:
        """Write whatever is left, and close the file."""
        self._recorder.add_findings(self._nonfinite.pop())
        if orderly or not self._sampler.late:
            self._guarded(self._write_arrived)(wait=True)
        self._recorder.look_at_pending(self._nonfinite.check_late)
        self._found(self._recorder.close(orderly=orderly))

    def _note_no_step(self, step: Step) -> None:
        if not step.ended and self._observer.marks.stepped_unseen(self.optimizers):
            self._recorder.add_findings(self._coverage.no_step(step.number))

    def _call_back(self, step: Step) -> None:
        for callback in self._step_ended:
            callback(step.number, step.sampled)

    def _note(self, findings: list[Finding]) -> None:
        """Report at once, and write with the next sample."""
        self._recorder.add_findings(self.reporter.take(findings))

    def _summarise(self) -> None:
        self.reporter.print_card(self._recorder.card, closing=True)
        line = self.reporter.summary(self.current_step, self.verdict)
        self.reporter.print_line(f"{line}; equipoise report {self.path}")


Pending = tuple[Effect, Step, Event]
CARRIED_OUT: dict[Effect, Callable[[Watch, Step, Any], object]] = {
    Effect.ARM: lambda w, step, event: w._sampler.arm(step),
    Effect.STORE_BATCH: lambda w, step, event: w._store_batch(),
    Effect.OPEN: lambda w, step, event: w._sampler.attach_probes(),
    Effect.CLOSE: lambda w, step, event: w._sampler.close_window(),
    Effect.REPLAY: lambda w, step, event: w._sampler.replay(),
    Effect.CHECK_LOSS: lambda w, step, event: w._nonfinite.check_loss(
        step.number, event.loss, event.roots
    ),
    Effect.READ_GRAPH: lambda w, step, event: w._sampler.read_graph(event.roots),
    Effect.SEEK_COMPILED: lambda w, step, event: w._seek_compiled(step, event.roots),
    Effect.CHECK_NORM: lambda w, step, event: w._check_norm(step, event),
    Effect.READ_GRADIENTS: lambda w, step, event: w._sampler.read_gradients(
        getattr(event, "scale", None)
    ),
    Effect.SNAPSHOT: lambda w, step, event: w._snapshot(event.optimizer),
    Effect.COPY_WEIGHTS: lambda w, step, event: w._sampler.copy_weights(
        event.optimizer
    ),
    Effect.READ_UPDATE: lambda w, step, event: w._sampler.read_update(event.optimizer),
    Effect.ADD_RATE: lambda w, step, event: w._add_rate(step, event.optimizer),
    Effect.FOLLOW_OPTIMIZER: lambda w, step, event: w._follow_optimizer(
        step, event.optimizer
    ),
    Effect.ADD_LOSS: lambda w, step, event: w._add_loss(step),
    Effect.FINISH: lambda w, step, event: w._finish(step),
    Effect.CHECK_COVERAGE: lambda w, step, event: w._check_coverage(step),
    Effect.WRITE: lambda w, step, event: w._write(step),
    Effect.ADVANCE: lambda w, step, event: w._advance(step),
    Effect.ACT: lambda w, step, event: w._act(event.optimizer),
    Effect.DROP: lambda w, step, event: w._sampler.drop(),
    Effect.LEAVE_LOOP: lambda w, step, event: w._off.close(),
    Effect.LEAVE: lambda w, step, event: w._stack.close(),
    Effect.WRITE_REST: lambda w, step, event: w._boundary.guarded(
        "the rest", w._write_rest
    )(getattr(event, "orderly", False)),
    Effect.NOTE_MOVED: lambda w, step, event: w._note(
        w._coverage.moved_unseen(step.number)
    ),
    Effect.NOTE_OTHER_BATCHES: lambda w, step, event: w._note(
        w._coverage.once(step.number, OTHER_BATCHES)
    ),
    Effect.NOTE_LATE_OPTIMIZER: lambda w, step, event: w._note(
        w._coverage.once(step.number, LATE_OPTIMIZER)
    ),
    Effect.NOTE_NO_STEP: lambda w, step, event: w._note_no_step(step),
    Effect.NOTE_FAILURE: lambda w, step, event: w._recorder.add_failures(
        event.number, w._boundary
    ),
    Effect.REPORT: lambda w, step, event: w.reporter.tell(),
    Effect.CALL_BACK: lambda w, step, event: w._call_back(step),
    Effect.SUMMARISE: lambda w, step, event: w._summarise(),
}
"""Who carries out each effect."""


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that does not keep its owner: a dropped handle is collected."""
    owner = weakref.WeakMethod(method)

    def call(*given: Any) -> Any:
        method = owner()
        return None if method is None else method(*given)

    return call
