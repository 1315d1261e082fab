"""Puts a step together: what was measured, by all ranks, derived, and written."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from equipoise.probes.boundary import Boundary
from equipoise.records import Finding, Reading
from equipoise.watching import collector, light
from equipoise.watching.collector import Table
from equipoise.watching.combining import combined
from equipoise.watching.derived import derived
from equipoise.watching.joining import completed
from equipoise.watching.ledger import Ledger
from equipoise.watching.light import Entry, Light
from equipoise.watching.message import Message
from equipoise.watching.meter import Meter
from equipoise.watching.ranks import Ranks
from equipoise.watching.sampling import Sampler
from equipoise.watching.schedule import Schedule


@dataclass(slots=True)
class Account:
    """What a run knows so far and has not written yet."""

    ledger: Ledger
    ranks: Ranks
    schedule: Schedule
    sampler: Sampler
    light: Light = field(default_factory=Light)
    _waiting: list[Finding] = field(default_factory=list)
    _reported: set[str] = field(default_factory=set)
    _said_interval: int = 0

    def note(self, findings: Sequence[Finding]) -> None:
        """Keep findings of this rank until the ranks next agree."""
        self._waiting += findings

    def sampled(self, step: int, table: Table, meter: Meter) -> list[Finding]:
        """Write a sampled step; return the findings all ranks agree on."""
        message = Message(
            table=table,
            parts=self.sampler.parts(),
            scalars=self.light.taken(),
            findings=self._waiting,
            cost=meter.cost or 0.0,
            plain=meter.plain or 0.0,
        )
        self._restore(message.scalars)  # until they are written, they are ours to keep
        answers = self.ranks.exchanged(message)
        if not answers:
            self.schedule.soon()  # the buffer was too small, and is larger now
            return []
        self.light.taken()
        whole = combined(answers) if len(answers) > 1 else message
        self._waiting = []
        shared = self.sampler.together([answer.parts for answer in answers])
        whole.table = completed(whole.table, shared)
        findings = [*whole.findings, *self._adapted(step, whole)]
        self._write(step, whole, findings)
        return findings

    def flushed(self) -> list[Finding]:
        """Write what gathered off-sample, if it is time and nobody must be asked."""
        urgent = bool(self._waiting) or self.light.due
        if self.ranks.count > 1 or not urgent:
            return []
        return self._flush(
            [Message(scalars=self.light.taken(), findings=self._waiting)]
        )

    def closed(self, *, orderly: bool) -> list[Finding]:
        """Write whatever is left and close the file."""
        message = Message(scalars=self.light.taken(), findings=self._waiting)
        last = self.ranks.farewell(message) if orderly else [message]
        if orderly and len(last) < self.ranks.count:
            message.findings.append(_lost(self.schedule.step, self.ranks))
        findings = self._flush(last or [message])
        self.ledger.close()
        return findings

    def failures(self, step: int, boundary: Boundary) -> None:
        """Note a finding for each probe that died since the last step."""
        new = boundary.failed.keys() - self._reported
        self._reported |= new
        self.note([_failure(step, name, boundary.failed[name]) for name in sorted(new)])

    def _flush(self, messages: Sequence[Message]) -> list[Finding]:
        self._waiting = []
        whole = combined(messages) if len(messages) > 1 else messages[0]
        self.ledger.write(light.as_readings(whole.scalars), whole.findings)
        return whole.findings

    def pending(self) -> list[Entry]:
        """Return the scalars that are not in the file yet; they stay to be written."""
        scalars = self.light.taken()
        self._restore(scalars)
        return scalars

    def restore(self, scalars: Sequence[Entry]) -> None:
        """Take up a checkpoint's scalars in place of those gathered since."""
        self.light.taken()
        self._restore(scalars)

    def _restore(self, scalars: Sequence[Entry]) -> None:
        for step, name, value in scalars:
            self.light.add(step, name, value)

    def _write(self, step: int, whole: Message, findings: Sequence[Finding]) -> None:
        readings: list[Reading] = light.as_readings(whole.scalars)
        now = [reading for reading in readings if reading.step == step]
        heavy = collector.as_readings(step, whole.table)
        more = derived(step, [*now, *heavy], list(self.sampler.anatomy.blocks))
        self.ledger.write([*readings, *heavy, *more], findings)

    def _adapted(self, step: int, whole: Message) -> list[Finding]:
        interval = self.schedule.adapt(cost=whole.cost, plain=whole.plain)
        old = self._said_interval or self.schedule.every
        if interval is None or 1 / 2 < interval / old < 2:
            return []
        self._said_interval = interval
        return [_thinned(step, interval, self.schedule, whole)]


def _thinned(step: int, interval: int, schedule: Schedule, whole: Message) -> Finding:
    return Finding(
        step=step,
        severity="info",
        rule="watch.budget",
        message=f"sampling every {interval} steps from here on (asked: every "
        f"{schedule.every}): a sample takes {whole.cost / whole.plain:.2f} steps, and "
        f"the budget is {schedule.budget:.1%}",
        advice="raise the budget, choose preset='minimal', or accept fewer samples",
        evidence={"interval": interval, "cost": whole.cost, "plain": whole.plain},
    )


def _lost(step: int, ranks: Ranks) -> Finding:
    return Finding(
        step=step,
        severity="warn",
        rule="watch.rank_lost",
        message=f"only rank {ranks.rank} of {ranks.count} came to the end: the others "
        "died, or left without closing; scalars since the last sample are this rank's",
        advice="look at the other ranks' logs; every sample before this is complete",
        evidence={"rank": ranks.rank},
    )


def _failure(step: int, name: str, error: BaseException) -> Finding:
    return Finding(
        step=step,
        severity="warn",
        rule="probe.failed",
        message=f"the {name} probe failed and was detached: {error!r}",
        advice="training is unaffected; please report the logged traceback",
    )
