"""Records steps: puts together what all ranks measured, writes it, reports findings.

Everything that leaves the training process passes here: readings to the run file and
the sinks, findings to the log and to the user's callback, one line to the terminal when
watching begins and one when it ends.
"""

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from equipoise.judging.card import Card
from equipoise.judging.checks.checker import Checker
from equipoise.judging.facts import Facts
from equipoise.judging.judge import Judge
from equipoise.judging.verdict import STATES, Verdict
from equipoise.probes.capture import Boundary, HostTransfer
from equipoise.records import Applied, Finding, Reading, Scalar
from equipoise.sinks import IsolatedSink, by_step
from equipoise.store import RetryingWriter, RunWriter
from equipoise.text.card import worded as worded_card
from equipoise.text.render import render
from equipoise.watching.findings import (
    RANKS_APART,
    at_other_steps,
    batches_left_out,
    interval_changed,
    not_exchanged,
    not_shared,
    probe_failed,
    rank_lost,
)
from equipoise.watching.ranks.group import Ranks, SingleRank
from equipoise.watching.ranks.merge import (
    RankSample,
    add_shared,
    cleared_by_rank,
    merge_messages,
    steps_by_rank,
)
from equipoise.watching.step.layers import unread_mixers
from equipoise.watching.step.measure import Sampler
from equipoise.watching.step.readings import (
    Entry,
    HostSample,
    PendingSample,
    RecordedSettings,
    StepScalars,
    derived_readings,
    scalar_readings,
    table_readings,
)
from equipoise.watching.step.schedule import Meter, Schedule

log = logging.getLogger("equipoise")
EARLY_CARDS = 16
VERDICT = "verdict.state"
"""Sent to sinks at sampled steps: the state's place in ``verdict.STATES``."""
Check = Callable[[list[Entry]], list[Finding]]
UNREAD_RULES = "rules.unread"
"""In the run file only: that a preset reads less than another is no news."""
LEVELS = {"info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class StepWriter:
    """Writes readings and findings; only the first rank has a file and sinks."""

    def __init__(
        self, run: RunWriter | None = None, sinks: Sequence[IsolatedSink] = ()
    ) -> None:
        self._run = None if run is None else RetryingWriter(run)
        self._sinks = sinks
        self._step = 0
        self.applied: list[Applied] = []
        """Remedies applied or undone since the last write."""

    def write(
        self,
        readings: Sequence[Reading],
        findings: Sequence[Finding],
        judge: Judge | None = None,
        card: Card | None = None,
    ) -> list[Finding]:
        """Write to the run file and the sinks; return what went wrong with them."""
        if self._run is None or not (readings or findings or self.applied or card):
            return []
        findings = list(map(render, findings))
        applied, self.applied = self.applied, []
        found = self._run.append(readings, findings, applied, card)
        steps = by_step(readings) if self._sinks else {}
        self._step = max((r.step for r in readings), default=self._step)
        if judge is not None and self._sinks:
            steps[self._step][VERDICT] = float(STATES.index(judge.verdict.state))
        failed = [f for sink in self._sinks for f in sink.log(steps)]
        failed += [f for sink in self._sinks for f in sink.report(findings, self._step)]
        if failed:
            found += [*failed, *self._run.append((), failed)]
        return found

    def close(self) -> list[Finding]:
        """Close the sinks and the file; return what went wrong with them."""
        if self._run is None:
            return []
        run, self._run = self._run, None
        failed = [f for sink in self._sinks for f in sink.close(self._step)]
        found = run.append((), failed) if failed else []
        return [*failed, *found, *run.close()]


@dataclass(slots=True, weakref_slot=True)
class Recorder:
    """What a run knows so far and has not written yet."""

    writer: StepWriter
    ranks: Ranks
    schedule: Schedule
    blocks: list[str]
    """The model's blocks by name. No module is held: a dropped model must be free."""
    judge: Judge = field(default_factory=Judge)
    """Judges what is written, in the order of writing: the same on every rank."""
    checker: Checker = field(default_factory=Checker)
    """Checks what the loop does, on what all ranks saw."""
    card: Card = field(default_factory=Card)
    """What the loop was seen to do so far."""
    scalars: StepScalars = field(default_factory=StepScalars)
    settings: RecordedSettings = field(default_factory=RecordedSettings)
    moving: PendingSample | None = None
    """What was sent to the host and is not written yet, from one process alone."""
    _findings: list[Finding] = field(default_factory=list)
    _failures_reported: set[str] = field(default_factory=set)
    _interval_reported: int = 0
    _reported: set[Scalar] = field(default_factory=set)
    """Classes of layers not read, and codes of findings that are made once."""
    cleared: int = 0
    """Batches whose gradients were cleared without a step."""

    def note_remedy(self, applied: Applied) -> None:
        """Keep until the next write that a remedy was applied, or undone."""
        self.writer.applied.append(applied)

    def add_settings(self, step: int, optimizer: Optimizer, number: int) -> None:
        """Add the learning rate, and the settings of an optimiser that moved."""
        self.scalars.add_rate(step, optimizer, number)
        for name, value in self.settings.moved(optimizer, number):
            self.scalars.add(step, name, value)

    def add_findings(self, findings: Sequence[Finding]) -> None:
        """Keep findings of this rank until the next write."""
        self._findings += findings

    def send(self, step: int | None, readings: HostTransfer) -> None:
        """Write these once they have arrived; scalars gathered from now on wait."""
        self.moving = PendingSample(step, readings, self.scalars)
        self.scalars = StepScalars()

    @contextmanager
    def received(self) -> Iterator[HostSample]:
        """Give what was sent, with the scalars of that time; wait for it if need be."""
        assert self.moving is not None
        moving, self.moving = self.moving, None
        newer, self.scalars = self.scalars, moving.scalars
        try:
            table = moving.readings.table()
            parts, facts = moving.readings.parts(), moving.readings.facts()
            yield HostSample(moving.step, table, parts, facts)
        finally:
            self.scalars.extend(newer)

    def write_arrived(
        self, check: Check, meter: Meter, sampler: Sampler
    ) -> list[Finding]:
        """Write what was sent; ``check`` looks at its scalars first."""
        with self.received() as received:
            self.look_at_pending(check)
            if received.step is None:
                return self.flush()
            self.add_failures(received.step, sampler.boundary)
            return self._write_sample(received.step, received, meter, sampler)

    def _write_sample(
        self, step: int, received: HostSample, meter: Meter, sampler: Sampler
    ) -> list[Finding]:
        """Write a sampled step; return the findings all ranks agree on."""
        message = RankSample(
            table=received.table,
            parts=received.parts if self.ranks.count > 1 else {},
            scalars=self.scalars.fetch(),  # they are pending until they are written
            findings=self._findings,
            cost=meter.cost or 0.0,
            plain=meter.plain or 0.0,
            step=step,
            cleared=self.cleared,
            facts=received.facts,
        )
        try:
            messages = self.ranks.exchange(message)
        except RuntimeError as error:
            self.leave_group(self.not_exchanged(step, error), sampler)
            return self.flush_if_due()
        if not messages:
            self.schedule.soon()  # the buffer was too small, and is larger now
            return []
        if steps := steps_by_rank(messages):
            self.leave_group(at_other_steps(step, steps), sampler)
            return self.flush_if_due()
        self.scalars.pop()
        merged = merge_messages(messages) if len(messages) > 1 else message
        self._findings = []
        shared = sampler.read_parts([message.parts for message in messages])
        merged.table = add_shared(merged.table, shared)
        facts = Facts(step=step, ranks=tuple(message.facts for message in messages))
        found = [*self._left_out(step, messages), *self._adapt(step, merged)]
        found += self._checked(facts)
        merged.scalars += self.settings.of_loop(facts)
        return self._write(step, merged, [*merged.findings, *found])

    @property
    def flush_due(self) -> bool:
        """Whether it is time to write off-sample, and no other rank is needed."""
        urgent = bool(self._findings) or self.scalars.due
        return urgent and self.ranks.count == 1

    def flush_if_due(self) -> list[Finding]:
        """Write what gathered off-sample, if it is time."""
        return self.flush() if self.flush_due else []

    def flush(self) -> list[Finding]:
        """Write scalars and findings without a sample."""
        return self._flush([self._scalars_and_findings()])

    def close(self, *, orderly: bool) -> list[Finding]:
        """Write whatever is left and close the file."""
        alone = list[Finding]()
        if self.moving is not None:  # no model is here, or no other rank
            with self.received() as received:
                alone = self._write_alone(received)
        message = self._scalars_and_findings()
        last = self.ranks.final_exchange(message) if orderly else [message]
        if orderly and len(last) < self.ranks.count:
            message.findings.append(
                rank_lost(self.schedule.step, self.ranks.rank, self.ranks.count)
            )
        found = self._flush(last or [message], self.card or None)
        return alone + found + self.writer.close()

    def add_failures(self, step: int, boundary: Boundary) -> None:
        """Add a finding for each probe that failed since the last step."""
        new = boundary.failed.keys() - self._failures_reported
        self._failures_reported |= new
        failed = boundary.failed
        self.add_findings([probe_failed(step, n, failed[n]) for n in sorted(new)])

    def fetch_pending(self) -> list[Entry]:
        """Return the scalars that are not in the file yet; they stay to be written."""
        moving = [] if self.moving is None else self.moving.scalars.fetch()
        return [*moving, *self.scalars.fetch()]

    def look_at_pending(self, check: Check) -> None:
        """Add what ``check`` finds in the scalars that are about to be written."""
        self.add_findings(check(self.fetch_pending()))

    def restore(self, scalars: Sequence[Entry]) -> None:
        """Continue with a checkpoint's scalars in place of those gathered since."""
        self.moving = None
        self.scalars.pop()
        self._restore(scalars)

    def _restore(self, scalars: Sequence[Entry]) -> None:
        for step, name, value in scalars:
            self.scalars.add(step, name, value)

    def _scalars_and_findings(self) -> RankSample:
        return RankSample(scalars=self.scalars.pop(), findings=self._findings)

    def _flush(
        self, messages: Sequence[RankSample], card: Card | None = None
    ) -> list[Finding]:
        self._findings = []
        merged = merge_messages(messages) if len(messages) > 1 else messages[0]
        readings = scalar_readings(merged.scalars)
        findings = [*merged.findings, *self._judged(readings, merged.findings)]
        return findings + self.writer.write(readings, findings, card=card)

    def _judged(
        self, readings: Sequence[Reading], findings: Sequence[Finding]
    ) -> list[Finding]:
        """Return what the rules find in readings that are about to be written."""
        found = self.judge.add(readings)
        self.judge.note(map(render, findings))
        return found

    def _checked(self, facts: Facts) -> list[Finding]:
        """Put facts on the card; return what the checks find in them."""
        self.card = self.card.after(facts)
        self.judge.unseen = self.card.unseen
        unread = [
            f for f in unread_mixers(facts) if f.params["class"] not in self._reported
        ]
        self._reported |= {f.params["class"] for f in unread}
        return [*unread, *self.checker.add(facts)]

    def _card_due(self) -> bool:
        """Whether the card is written with this sample: early ones, then each 16th.

        A card of a large model is some kilobytes, and changes little after the start.
        """
        return self.card.samples <= EARLY_CARDS or self.card.samples % EARLY_CARDS == 0

    def _write(
        self, step: int, merged: RankSample, findings: Sequence[Finding]
    ) -> list[Finding]:
        scalars = scalar_readings(merged.scalars)
        now = [reading for reading in scalars if reading.step == step]
        sampled = table_readings(step, merged.table)
        derived = derived_readings(step, [*now, *sampled], self.blocks)
        readings = [*scalars, *sampled, *derived]
        found = [*findings, *self._judged(readings, findings)]
        card = self.card if self._card_due() else None
        return found + self.writer.write(readings, found, self.judge, card)

    def _write_alone(self, received: HostSample) -> list[Finding]:
        step = received.step
        if step is None:
            return []
        message = self._scalars_and_findings()
        message.table, self._findings = received.table, []
        facts = Facts(step=step, ranks=(received.facts,))
        found = self._checked(facts)
        message.scalars += self.settings.of_loop(facts)
        if self.ranks.count > 1:
            message = merge_messages([message])
            message.findings.append(not_shared(step, self.ranks.rank, self.ranks.count))
        return self._write(step, message, [*message.findings, *found])

    def not_exchanged(self, step: int, error: Exception) -> Finding:
        """Return that the exchange with the other ranks failed."""
        return not_exchanged(step, self.ranks.rank, self.ranks.count, error)

    def leave_group(self, why: Finding, sampler: Sampler) -> None:
        """Go on without the other ranks; what was shared with them is not written."""
        self.add_findings([why])
        self.ranks = SingleRank(self.ranks.rank)
        sampler.leave_group()
        self.schedule.soon()

    def _left_out(self, step: int, messages: Sequence[RankSample]) -> list[Finding]:
        left_out = cleared_by_rank(messages)
        if not left_out or RANKS_APART in self._reported:
            return []
        self._reported.add(RANKS_APART)
        return [batches_left_out(step, left_out)]

    def _adapt(self, step: int, merged: RankSample) -> list[Finding]:
        interval = self.schedule.adapt(cost=merged.cost, plain=merged.plain)
        old = self._interval_reported or self.schedule.every
        if interval is None or 1 / 2 < interval / old < 2:
            return []
        self._interval_reported = interval
        return [
            interval_changed(
                step,
                interval=interval,
                every=self.schedule.every,
                cost=merged.cost,
                plain=merged.plain,
                budget=self.schedule.budget or 0.0,
            )
        ]


class Reporter:
    """Reports each finding once: to the log on the first rank, to the user on all."""

    def __init__(
        self,
        on_finding: Callable[[Finding], Any] | None,
        *,
        first_rank: bool = True,
        quiet: bool = False,
    ) -> None:
        self._on_finding, self._first_rank, self._quiet = on_finding, first_rank, quiet
        self.findings: list[Finding] = []
        self._untold: list[Finding] = []
        self._card_printed = False

    def print_card(self, card: Card, *, closing: bool = False) -> None:
        """Print the card's three lines, once: most is known at the second sample."""
        if self._card_printed or not (card.samples >= 2 or (closing and card)):
            return
        self._card_printed = True
        for line in worded_card(card).opening:
            self.print_line(line)

    def take(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the new ones among these, after logging them; the user waits."""
        rendered = map(render, findings)
        new = [finding for finding in rendered if finding not in self.findings]
        for finding in new:
            self.findings.append(finding)
            if self._first_rank and finding.code != UNREAD_RULES:
                where = f" at {finding.site}" if finding.site else ""
                text = f"equipoise: step {finding.step}{where}: {finding.message}"
                log.log(LEVELS[finding.severity], "%s", text)
        if self._on_finding is not None:
            self._untold += new
        return new

    def tell(self) -> None:
        """Call the user back; what a callback raises reaches the user."""
        while self._untold and self._on_finding is not None:
            self._on_finding(self._untold.pop(0))

    @property
    def worst(self) -> Finding | None:
        """The most severe finding, the earliest of those."""
        return min(self.findings, key=lambda found: found.order, default=None)

    def summary(self, steps: int, verdict: Verdict) -> str:
        """Return the run in one sentence: its verdict, and what else was found."""
        text = f"{steps} steps watched, {verdict.state}: {verdict.headline}"
        worst = self.worst
        if worst is None or worst.severity == "info" or worst in verdict.findings:
            return text
        where = f" at {worst.site}" if worst.site else ""
        return f"{text}; {worst.severity} at step {worst.step}{where}: {worst.message}"

    def print_line(self, text: str) -> None:
        """Print once: to the log if it shows such lines, otherwise to stderr."""
        if not self._first_rank:
            return
        if log.isEnabledFor(logging.INFO):
            log.info("equipoise: %s", text)
        elif not self._quiet:
            # Not through rich: importing it draws from Python's random.
            name = "\x1b[1mequipoise\x1b[0m" if sys.stderr.isatty() else "equipoise"
            print(name, text, file=sys.stderr)


def write_rest(recorder: Recorder, process: int) -> None:
    """Write what a handle that was dropped had gathered, and close its file."""
    if os.getpid() != process:
        return
    try:
        recorder.close(orderly=False)
    except Exception:
        log.exception("equipoise: the rest of a dropped run could not be written")


def close_handle(reference: "weakref.ref[Any]") -> None:
    """Close a handle at the end of the process, if it is still there."""
    handle = reference()
    if handle is not None:
        handle.close()
