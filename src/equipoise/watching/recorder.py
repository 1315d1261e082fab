"""Puts a step together: what was measured, by all ranks, derived, and written.

Everything that leaves the training process: to the run file and the sinks.

Readings that follow from other readings, on the host, without the model.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from equipoise.probes.capture import Boundary
from equipoise.records import Finding, Reading
from equipoise.store import RunWriter
from equipoise.watching.merge import Message, combined, completed
from equipoise.watching.options import Sink
from equipoise.watching.ranks import Ranks
from equipoise.watching.sampler import Sampler
from equipoise.watching.schedule import Meter, Schedule
from equipoise.watching.step_readings import (
    Entry,
    Light,
    Table,
    as_readings,
    scalar_readings,
)


class Ledger:
    """Writes what the ranks agreed on; only the first rank has a file and sinks."""

    def __init__(self, writer: RunWriter | None, sinks: Sequence[Sink]) -> None:
        self._writer = writer
        self._sinks = sinks if writer is not None else ()

    def write(self, readings: Sequence[Reading], findings: Sequence[Finding]) -> None:
        """Commit readings and findings in one transaction, then tell the sinks."""
        if self._writer is None or not (readings or findings):
            return
        self._writer.append(readings, findings=findings)
        for sink in self._sinks:
            for step, values in by_step(readings).items():
                sink.log(values, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def by_step(readings: Sequence[Reading]) -> dict[int, dict[str, float]]:
    """Return step → flat names → numbers, one per site: the mean over its heads.

    Example:
        >>> by_step([Reading.scalar(3, "loss", 0.5)])
        {3: {'loss': 0.5}}
    """
    out: dict[int, dict[str, float]] = {}
    for reading in readings:
        here = out.setdefault(reading.step, {})
        for site, values in zip(reading.sites, reading.values, strict=True):
            name = f"{reading.quantity}/{site}" if site else reading.quantity
            if values:
                here[name] = sum(values) / len(values)
    return out


Values = dict[str, tuple[float, ...]]
"""site → values."""
DerivedTable = dict[str, Values]
"""quantity → site → values."""


def derived(step: int, readings: Iterable[Reading], blocks: list[str]) -> list[Reading]:
    """Return the step's derived readings; what cannot be derived is absent, never 0."""
    table = {r.quantity: dict(zip(r.sites, r.values, strict=True)) for r in readings}
    found = [
        *_gradients(table, blocks),
        *_updates(table),
        *_sensitivities(table, blocks),
    ]
    return [
        Reading(step=step, quantity=q, sites=tuple(v), values=tuple(v.values()))
        for q, v in found
        if v
    ]


def _gradients(table: DerivedTable, blocks: list[str]) -> Iterator[tuple[str, Values]]:
    norms = table.get("gradient.norm", {})
    if norms and "gradient.norm.total" not in table:
        total = math.sqrt(sum(v[0] ** 2 for v in norms.values()))
        yield "gradient.norm.total", {"": (total,)}
    if blocks and {blocks[0], blocks[-1]} <= norms.keys() and norms[blocks[-1]][0]:
        ratio = norms[blocks[0]][0] / norms[blocks[-1]][0]
        yield "gradient.first_to_last", {"": (ratio,)}


def _updates(table: DerivedTable) -> Iterator[tuple[str, Values]]:
    moved, size = table.get("update.norm", {}), table.get("weight.norm", {})
    here = [site for site in moved if site in size and size[site][0]]
    yield "update.ratio", {s: (moved[s][0] / size[s][0],) for s in here}


def _sensitivities(
    table: DerivedTable, blocks: list[str]
) -> Iterator[tuple[str, Values]]:
    """S = θ·B̄²·G per attention site, with B̄ of its input and of its block's stream.

    The factors are kept as logarithms: their differences over time or over layers
    say which of them moved S.
    """
    G, theta = table.get("projection.G", {}), table.get("attention.theta.mean", {})
    streams = table.get("residual.B", {})
    mean = {site: sum(v) / len(v) for site, v in theta.items() if site in G}
    for name, B in (
        ("S", table.get("attention.B", {})),
        (
            "S_residual",
            {s: streams[b] for s in mean if (b := block_of(s, blocks)) in streams},
        ),
    ):
        here = [site for site in G if site in mean and site in B]
        S: Values = {s: (mean[s] * B[s][0] ** 2 * G[s][0],) for s in here}
        yield f"sensitivity.{name}", S
        yield f"sensitivity.{name}.ln_B2", {s: (2 * _ln(B[s][0]),) for s in here}
    yield "sensitivity.ln_theta", {s: (_ln(mean[s]),) for s in G if s in mean}
    yield "sensitivity.ln_G", {s: (_ln(G[s][0]),) for s in G if s in mean}


def block_of(site: str, blocks: list[str]) -> str:
    """Return the block a site lies in, or an empty name."""
    return next((b for b in blocks if f"{site}.".startswith(f"{b}.")), "")


def _ln(x: float) -> float:
    """Return ln x, with ln 0 = -inf: a dead factor is a reading, not an error."""
    return math.log(x) if x > 0 else (-math.inf if x == 0 else math.nan)


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
        self.ledger.write(scalar_readings(whole.scalars), whole.findings)
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
        readings: list[Reading] = scalar_readings(whole.scalars)
        now = [reading for reading in readings if reading.step == step]
        heavy = as_readings(step, whole.table)
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
