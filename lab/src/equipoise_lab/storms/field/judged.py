"""What the rules and checks say of recorded units, and what became of the units.

What became of a unit is decided by its loss beside its twin's, never by the judge. A
healthy unit that learnt nothing, or whose loss came back up, is *void*: what is said of
it is neither right nor wrong, so it is counted apart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from equipoise.judging.checks.checker import Checker
from equipoise.judging.judge import Judge
from equipoise.judging.rules import configured
from equipoise.records import Finding
from equipoise_lab.storms.field.faults import CLAIMS, FAULTS, OF_CHECKS, Family
from equipoise_lab.storms.field.manifest import Unit
from equipoise_lab.storms.field.recording import Recorded, place, read
from equipoise_lab.storms.labels import FAILED, SURVIVED, onset

Outcome = Literal["healthy", "void", "failed", "survived", "between"]
Cause = Literal["right", "wrong", "none"]
FLOOR = 0.02
"""Nats by which a loss must be above its twin's besides: a solved task is near 0."""
ROOM = 32
"""Steps between a fault and its onset in the loss that leave room for a warning."""
LEARNT = 0.98
"""Largest last loss over the first of an untrained model that has learnt something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A unit, what became of it, and what was said of it."""

    unit: Unit
    outcome: Outcome
    shown: int | None
    """The step at which the loss shows the fault; None where it never does."""
    warnings: tuple[Finding, ...]
    """Warnings and errors in the order they were found, the ends of some not among."""
    state: str
    """The verdict at the end."""
    headline: str
    """The code that the verdict at the end puts first; empty of a healthy one."""

    @property
    def after(self) -> tuple[Finding, ...]:
        """Warnings from the fault's first step on."""
        return tuple(f for f in self.warnings if f.step >= self.unit.onset)

    @property
    def by_rules(self) -> tuple[Finding, ...]:
        """Warnings of rules: what checks found is not among."""
        return tuple(f for f in self.warnings if not f.belongs_to("check"))

    @property
    def has_error(self) -> bool:
        """Whether a rule said error from the fault's first step on."""
        return any(f.severity == "error" for f in self.by_rules if f in self.after)

    @property
    def lead(self) -> int | None:
        """Steps by which the first warning came before the loss showed the fault."""
        if not self.after or self.shown is None:
            return None
        return self.shown - self.after[0].step

    @property
    def has_room(self) -> bool:
        return self.shown is not None and self.shown - self.unit.onset >= ROOM

    @property
    def cause(self) -> Cause:
        """Whether the headline names the fault's family, another one, or none."""
        claims = claimed(self.headline)
        if claims is None:
            return "none"
        fault = FAULTS[self.unit.fault]
        return "right" if claims in (fault.family, *fault.also) else "wrong"


def claimed(code: str) -> Family | None:
    """Return the family that a headline's code says is at fault, if it does."""
    for area, family in OF_CHECKS.items():
        if code.startswith(area):
            return family
    return CLAIMS.get(code)


def judged(unit: Unit, recorded: Recorded, twin: Recorded | None) -> Judged:
    """Judge a recorded unit with the rules as they are now."""
    judge = Judge(recorded.details, rules=configured(of="run"))
    found = judge.add(recorded.readings)
    given = checked(recorded)
    elsewhere = (f for f in recorded.findings if not f.belongs_to("check"))
    judge.note((*elsewhere, *given))
    verdict = judge.verdict
    warnings = [f for f in (*found, *given) if f.severity != "info"]
    first = verdict.cause or verdict.lead
    return Judged(
        unit=unit,
        outcome=outcome(unit, recorded, twin),
        shown=None if twin is None else onset(recorded.losses, twin.losses),
        warnings=tuple(sorted(warnings, key=lambda f: f.step)),
        state=verdict.state,
        headline="" if first is None else _headline(first),
    )


def checked(recorded: Recorded) -> list[Finding]:
    """Return what checks find, as they are now where what they read was kept."""
    if not recorded.facts:
        return [f for f in recorded.findings if f.belongs_to("check")]
    checker = Checker()
    return [finding for facts in recorded.facts for finding in checker.add(facts)]


def _headline(first: Finding) -> str:
    setting = first.params.get("setting")
    return f"{first.code}:{setting}" if setting else first.code


def outcome(unit: Unit, recorded: Recorded, twin: Recorded | None) -> Outcome:
    """Return the outcome of a unit, by its loss alone."""
    if twin is None:
        return "healthy" if trained_well(unit, recorded) else "void"
    excess = recorded.validation - twin.validation
    if excess > max(FLOOR, (FAILED - 1) * twin.validation) or math.isnan(excess):
        return "failed"
    small = excess <= max(FLOOR / 2, (SURVIVED - 1) * twin.validation)
    return "survived" if small else "between"


def trained_well(unit: Unit, recorded: Recorded) -> bool:
    """Whether the loss fell, and its last quarter is as good as any before."""
    losses, size = recorded.losses, max(1, len(recorded.losses) // 4)
    if not losses or not all(map(math.isfinite, [*losses, recorded.validation])):
        return False
    quarters = [sum(losses[k * size : (k + 1) * size]) / size for k in range(4)]
    if not unit.trained and quarters[-1] > LEARNT * losses[0]:
        return False
    return quarters[-1] <= FAILED * min(quarters) + FLOOR


def judge_all(units: Sequence[Unit], folder: Path) -> list[Judged]:
    """Judge what is recorded of a part; a fault whose twin is void is left out."""
    kept: Mapping[str, Recorded] = {
        unit.name: read(place(folder, unit))
        for unit in units
        if place(folder, unit).exists()
    }
    kept = {name: one for name, one in kept.items() if not one.refused}
    found: dict[str, Judged] = {}
    for unit in (u for u in units if u.name in kept):
        if unit.twin and unit.twin not in kept:
            continue
        one = judged(unit, kept[unit.name], kept.get(unit.twin))
        if unit.twin and found[unit.twin].outcome == "void":
            continue
        found[unit.name] = one
    return list(found.values())
