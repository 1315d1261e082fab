"""Decides on a verdict, acts at the end of a step, watches what it did, takes it back.

A decision is made at a sampled step from what all ranks have merged. The first rank
chooses (it may ask a person, or try on a copy), and all agree through the watch's own
exchange; each then acts after its ``optimizer.step()`` has ended. Steps that were
rolled back stay counted.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from equipoise.anatomy.sites import unwrapped
from equipoise.autopilot.options import Autopilot, Proposal
from equipoise.autopilot.snapshots import Snapshot, Snapshots, restore, take
from equipoise.autopilot.state import Course, Event, LogEntry, State
from equipoise.autopilot.treatments import (
    BY_NAME,
    Treatment,
    TreatmentEvidence,
    candidates,
    evidence_of,
    level,
)
from equipoise.autopilot.trial import Loss, no_trial, run_trial
from equipoise.autopilot.tried import untried
from equipoise.errors import InputError
from equipoise.judging.history import Curve
from equipoise.judging.judge import Judge
from equipoise.records import Finding
from equipoise.remedies.base import Undo
from equipoise.remedies.catalogue import remedy

Agree = Callable[[str], Sequence[str] | None]
"""This rank's text → every rank's, the first rank's in front; None if one is missing.
"""
HARM = 1.05
"""A treatment is harmful if the loss ends above this beside where it began."""
RECENT = 8
"""Losses by which a treatment is measured."""
USUAL, IN_A_ROW = 1.15, 4
"""Bad batches are over after so many losses in a row up to this beside the usual."""
PATIENCE = 150
"""Steps after which batches that stay unusual are the new usual ones."""
WARM_UP: tuple[str, dict[str, Any]] = ("learning_rate", {"scale": 1.0, "warmup": 20})
"""The remedy that follows every roll-back whose treatment has no warm-up of its own."""
BELOW_COMPILED = frozenset(
    "learning_rate beta2 skip_step weight_cap master_weights".split()
)
"""Remedies that act on the optimiser's step and on weights, not inside the model."""


class Pilot:
    """The autopilot of one watched run: ``handle.autopilot``."""

    def __init__(
        self,
        options: Autopilot,
        model: nn.Module,
        *,
        agree: Agree = lambda text: [text],
        first_rank: bool = True,
        stored_loss: Callable[[], Loss | None] = lambda: None,
        folder: Path | None = None,
    ) -> None:
        self.options, self.model, self.state = options, model, State()
        self.snapshots = Snapshots(
            every=options.snapshot_every, memory=options.memory, folder=folder
        )
        self.stopped = ""
        """Why it does nothing any more, if so."""
        self.only_says = options.dry_run
        """Whether it changes nothing: as asked, or because it was not tried here."""
        self._considered = False
        self._agree, self._first_rank = agree, first_rank
        self._stored_loss = stored_loss
        self._undos: list[list[Undo]] = []
        """Of each active treatment."""
        self._warming: Undo | None = None
        """The warm-up after the latest roll-back."""
        self._pending: list[Callable[[Optimizer], None]] = []
        self._unreported: list[LogEntry] = []

    @property
    def log(self) -> tuple[LogEntry, ...]:
        """Everything it did, and why, oldest first."""
        return tuple(self.state.log)

    def __str__(self) -> str:
        return "\n".join(map(str, self.log)) or "autopilot: nothing was done"

    def before_update(self, step: int, optimizer: Optimizer) -> None:
        """Take a snapshot if one is due."""
        warming = self._warming
        if warming is not None and warming.progress["step"] > WARM_UP[1]["warmup"]:
            self._end_warm_up()
        if not self.stopped and self.snapshots.due(step):
            if news := self.snapshots.take(step, self.model, optimizer):
                self._note(step, "snapshots", news)

    def consider(self, judge: Judge, optimizer: Optimizer) -> None:
        """Decide after a sampled step; ``act`` carries it out."""
        if self.stopped or self._pending:
            return
        self._say_if_untried(judge, optimizer)
        found = self._new_evidence(judge, optimizer)
        if self.state.course is not None:
            self._follow(self.state.course, judge)
        elif found is not None and self._may_propose(found, judge):
            self._propose(found, judge, optimizer)

    def act(self, optimizer: Optimizer) -> None:
        """Carry out what was decided; called where hooks may be changed."""
        pending, self._pending = self._pending, []
        for action in pending:
            action(optimizer)

    def pop_findings(self) -> list[Finding]:
        """Return what was logged since the last time, on the first rank."""
        new, self._unreported = self._unreported, []
        return [entry.finding() for entry in new]

    def stop(self, step: int, why: str) -> None:
        """Do nothing from now on; what is applied stays."""
        if not self.stopped:
            self.stopped = why
            self._note(step, "stopped", why)

    # Deciding

    def _new_evidence(
        self, judge: Judge, optimizer: Optimizer
    ) -> TreatmentEvidence | None:
        """Return what fires and is not muted; while a run settles, all is muted."""
        state, found = self.state, evidence_of(judge, optimizer)
        firing = {} if found is None else found.since
        settling = judge.history.step < state.settled
        muted = firing if settling else set(state.muted) & firing.keys()
        state.muted = sorted(muted)
        new = {rule: step for rule, step in firing.items() if rule not in muted}
        return replace(found, since=new) if found is not None and new else None

    def _say_if_untried(self, judge: Judge, optimizer: Optimizer) -> None:
        """Say once, at the first sample, if nothing will be done, and why."""
        if self._considered or self.only_says or self.options.untried:
            return
        self._considered = True
        if why := untried(self.model, optimizer, judge.history):
            self.only_says = True
            self._note(judge.history.step, "dry run", f"{why}; Autopilot(untried=True)")

    def _may_propose(self, found: TreatmentEvidence, judge: Judge) -> bool:
        """Whether there is budget, and a loss that is worse than it has been.

        What fires while a run is at its best does no harm yet, and a treatment may.
        """
        harmed = found.nonfinite or not is_at_best(judge.history.curve("loss"))
        return harmed and self.state.used < self.options.most

    def _propose(
        self, found: TreatmentEvidence, judge: Judge, optimizer: Optimizer
    ) -> None:
        """Let the first rank choose, agree, and plan what was agreed on."""
        state = self.state
        fitting = list(candidates(found, failed=state.failed, active=state.active))
        chosen = self._choose(found, fitting, optimizer) if self._first_rank else None
        held = [snapshot.step for snapshot in self.snapshots.kept]
        mine = {"held": held, "chosen": chosen}
        texts = self._agree(json.dumps(mine))
        if texts is None:
            return
        every = [json.loads(text) for text in texts]
        agreed = every[0]["chosen"]
        for name, why in agreed["refused"]:
            self._reject(found.step, name, "refused", why)
        if agreed["answer"] is None:
            return  # nothing fits, or it is asked again at the next sample
        proposal = Proposal(**agreed["proposal"])
        if not all(proposal.back_to in one["held"] for one in every):
            proposal = replace(proposal, back_to=None)
        if agreed["answer"]:
            self._plan(proposal, found, judge)
        else:
            self._reject(found.step, proposal.treatment, "declined", str(proposal))
            state.muted = sorted(_firing(judge))

    def _choose(
        self,
        found: TreatmentEvidence,
        fitting: Iterable[Treatment],
        optimizer: Optimizer,
    ) -> dict[str, Any]:
        """Return the first treatment that passes its trial, and a person's answer."""
        refused: list[tuple[str, str]] = []
        for treatment in fitting:
            snapshot = self._snapshot_for(found, treatment)
            trial, passes = self._tried(treatment, snapshot, optimizer)
            proposal = Proposal(
                step=found.step,
                treatment=treatment.name,
                remedies=treatment.options,
                back_to=None if snapshot is None else snapshot.step,
                because=found.sentence,
                trial=trial,
            )
            if not passes:
                refused.append((treatment.name, f"{proposal}; {trial}"))
                continue
            ask = self.options.ask
            answer = True if ask is None else ask(proposal)
            given = {"answer": None if answer is None else bool(answer)}
            shown = {n: getattr(proposal, n) for n in proposal.__slots__}
            return {**given, "proposal": shown, "refused": refused}
        return {"answer": None, "refused": refused}

    def _plan(self, proposal: Proposal, found: TreatmentEvidence, judge: Judge) -> None:
        state = self.state
        before = proposal.step if proposal.back_to is None else proposal.back_to
        state.used += 1
        self._settle(proposal.step, proposal.step - before)
        if self.only_says:
            self._note(proposal.step, "would apply", _described(proposal))
            return
        if found.nonfinite and proposal.back_to is None:
            self.stop(proposal.step, "the weights are lost, and no snapshot is kept")
            return
        course = Course(
            treatment=proposal.treatment,
            step=proposal.step,
            back_to=proposal.back_to,
            reference=level(judge.history.curve("loss"), before),
        )
        self._pending.append(lambda opt: self._apply(proposal, course, opt))

    def _settle(self, step: int, distance: int = 0) -> None:
        """Wait until the way back is covered again: readings jump until then."""
        self.state.settled = step + max(self.options.apart, distance)

    def _snapshot_for(
        self, found: TreatmentEvidence, treatment: Treatment
    ) -> Snapshot | None:
        """Return the latest snapshot before the trouble began, else the oldest."""
        oldest = 0 if self.options.back is None else found.step - self.options.back
        wanted = found.began - treatment.margin
        near = [s for s in self.snapshots.kept if s.step >= oldest]
        earlier = [s for s in near if s.step <= wanted]
        return earlier[-1] if earlier else next(iter(near), None)

    def _tried(
        self, treatment: Treatment, snapshot: Snapshot | None, optimizer: Optimizer
    ) -> tuple[str, bool]:
        steps = self.options.trial_steps
        if not steps or treatment.until_usual:
            return "", True  # the batches are at fault: a trial on others says nothing
        loss = self.options.loss or self._stored_loss()
        why = no_trial(self.model, optimizer, loss, memory=self.options.memory)
        if why or loss is None:
            return f"no shadow trial: {why}", True
        both = self.model, optimizer
        made = run_trial(both, treatment, snapshot, loss=loss, steps=steps)
        return str(made), made.passes

    # Following

    def _follow(self, course: Course, judge: Judge) -> None:
        """Look at what a treatment did: keep it, or take it back."""
        course.samples += 1
        step, losses = judge.history.step, _losses_since(judge, course.step)
        if BY_NAME[course.treatment].until_usual:
            self._follow_batches(course, step, losses)
            return
        if course.samples < self.options.probation:
            return
        now = _mean(losses[-RECENT:])
        text = f"{course.treatment}: loss {course.reference:.4g} → {now:.4g}"
        if now <= _times(course.reference, HARM):
            self.state.course = None
            self._note(step, "kept", text)
        else:
            self.state.failed.append(course.treatment)
            self._withdraw(step, text, back_to=course.back_to)

    def _follow_batches(self, course: Course, step: int, losses: list[float]) -> None:
        latest = losses[-IN_A_ROW:]
        usual = _times(course.reference, USUAL)
        if len(latest) == IN_A_ROW and max(latest) <= usual:
            self._withdraw(step, f"{course.treatment}: the loss is usual again")
        elif step - course.step >= PATIENCE:
            self.state.failed.append(course.treatment)
            self._withdraw(step, f"{course.treatment}: unusual for {PATIENCE} steps")

    def _withdraw(self, step: int, text: str, back_to: int | None = None) -> None:
        self.state.course = None
        self._settle(step)
        self._note(step, "withdrawn", text)
        self._pending.append(lambda optimizer: self._take_back(optimizer, back_to))

    # Acting

    def _apply(self, proposal: Proposal, course: Course, optimizer: Optimizer) -> None:
        present = take(proposal.step, self.model, optimizer)
        warm = WARM_UP[0] not in proposal.remedies
        self._go_back(course.back_to, optimizer, warm=warm)
        try:
            self._switch_on(proposal.treatment, proposal.remedies, optimizer)
        except InputError as error:
            restore(present, self.model, optimizer)
            self._end_warm_up()
            text = f"{proposal}: {error}"
            self._reject(proposal.step, proposal.treatment, "refused", text)
            return
        self.state.course = course
        self._note(proposal.step, "applied", _described(proposal))

    def _switch_on(
        self, treatment: str, remedies: Mapping[str, Any], optimizer: Optimizer
    ) -> None:
        undos: list[Undo] = []
        try:
            for name, options in remedies.items():
                inner = name in BELOW_COMPILED
                model = unwrapped(self.model) if inner else self.model
                undos.append(remedy(name, **options).apply(model, optimizer))
        except InputError:
            while undos:
                undos.pop()()
            raise
        self._undos.append(undos)
        self.state.active.append(treatment)

    def _take_back(self, optimizer: Optimizer, back_to: int | None) -> None:
        for undo in reversed(self._undos.pop()):
            undo()
        self.state.active.pop()
        self._go_back(back_to, optimizer)

    def _go_back(
        self, step: int | None, optimizer: Optimizer, *, warm: bool = True
    ) -> None:
        """Restore a snapshot; the rate begins anew, as it did at the start.

        The schedule is past its own warm-up: old weights at its full rate blow up.
        """
        kept = [s for s in self.snapshots.kept if s.step == step]
        if kept:
            restore(kept[0], self.model, optimizer)
            self.snapshots.forget_after(kept[0].step)
            self._end_warm_up()
            if warm:
                self._warm_up(optimizer)

    def _warm_up(self, optimizer: Optimizer) -> None:
        name, options = WARM_UP
        self._warming = remedy(name, **options).apply(unwrapped(self.model), optimizer)

    def _end_warm_up(self) -> None:
        if self._warming is not None:
            self._warming()
            self._warming = None

    # A checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint carries: the log, the budget, what is active."""
        progress = [[dict(undo.progress) for undo in undos] for undos in self._undos]
        warming = None if self._warming is None else dict(self._warming.progress)
        return {
            "state": self.state.to_dict(),
            "progress": progress,
            "warming": warming,
        }

    def load_state_dict(self, given: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Go on where a checkpoint stood; weights are those that were loaded."""
        self._end_warm_up()
        while self._undos:
            self._take_back(optimizer, None)
        self.state = State.from_dict(given["state"])
        self.snapshots.kept.clear()
        active, self.state.active = self.state.active, []
        loaded = take(0, self.model, optimizer)
        for name in active:
            self._switch_on(name, BY_NAME[name].remedies, optimizer)
        restore(loaded, self.model, optimizer)
        for undos, counted in zip(self._undos, given["progress"], strict=True):
            for undo, progress in zip(undos, counted, strict=True):
                undo.progress.update(progress)
        if given.get("warming") is not None:
            self._warm_up(optimizer)
            assert self._warming is not None
            self._warming.progress.update(given["warming"])

    # The log

    def _reject(self, step: int, treatment: str, event: Event, text: str) -> None:
        self.state.failed.append(treatment)
        self._note(step, event, text)

    def _note(self, step: int, event: Event, text: str) -> None:
        entry = LogEntry(step=step, event=event, text=text)
        self.state.log.append(entry)
        if self._first_rank:
            self._unreported.append(entry)


def _described(proposal: Proposal) -> str:
    parts = [str(proposal), f"because {proposal.because}", proposal.trial]
    return "; ".join(part for part in parts if part)


def _firing(judge: Judge) -> set[str]:
    return {finding.code for finding in judge.firing if finding.severity != "info"}


def _losses_since(judge: Judge, step: int) -> list[float]:
    curve = judge.history.curve("loss")
    pairs = zip(curve.steps, curve.values, strict=True)
    return [value for at, value in pairs if at > step]


def is_at_best(curve: Curve) -> bool:
    """Whether the latest losses are at or near the lowest so far; true without any.

    >>> curve = Curve()
    >>> for step in range(64): curve.add(step, 4.0 - step / 32)
    >>> is_at_best(curve)
    True
    >>> for step in range(64, 72): curve.add(step, 3.0)
    >>> is_at_best(curve)
    False
    """
    if not curve.count:
        return True
    lowest = min(curve.best, curve.values[0])
    return curve.smoothed(RECENT) <= _times(lowest, HARM)


def _times(loss: float, ratio: float) -> float:
    """Return a loss that is worse by a ratio; with other terms it may be negative."""
    return loss + (ratio - 1) * abs(loss)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
