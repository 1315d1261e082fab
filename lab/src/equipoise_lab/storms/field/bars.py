"""Counts against bars: exact intervals, and *met* only where the interval says so."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from scipy import stats

from equipoise_lab.storms.field.judged import Judged
from equipoise_lab.storms.field.manifest import Unit

Decision = Literal["met", "not met", "not decided"]
RATE_BAR, LEAD_BAR = 1.0, 25.0
"""False alarms per 10,000 healthy steps at most, and steps of lead at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A count of units, with its exact (Clopper–Pearson) 95 % interval."""

    what: str
    count: int
    of: int
    bar: float | None = None
    at_least: bool = True

    @property
    def interval(self) -> tuple[float, float]:
        """
        >>> low, high = Share(what="five", count=5, of=5).interval
        >>> round(low, 3), high
        (0.478, 1.0)
        """
        if not self.of:
            return 0.0, 1.0
        found = stats.binomtest(self.count, self.of).proportion_ci(0.95, "exact")
        return float(found.low), float(found.high)

    @property
    def decision(self) -> Decision | None:
        """
        >>> Share(what="all", count=54, of=54, bar=0.97).decision
        'not decided'
        >>> Share(what="all", count=140, of=140, bar=0.97).decision
        'met'
        """
        return None if self.bar is None else decided(self)

    def __str__(self) -> str:
        low, high = self.interval
        text = f"{self.count} of {self.of} ({100 * low:.1f} to {100 * high:.1f} %)"
        if self.bar is None:
            return text
        side = "at least" if self.at_least else "at most"
        return f"{text}; {side} {100 * self.bar:.0f} %: {self.decision}"


def decided(share: Share) -> Decision:
    low, high = share.interval
    assert share.bar is not None
    if share.at_least:
        met, missed = low >= share.bar, high < share.bar
    else:
        met, missed = high <= share.bar, low > share.bar
    return "met" if met else "not met" if missed else "not decided"


def per_10_000(count: int, steps: int) -> tuple[float, float, float]:
    """Return events per 10,000 steps with the exact Poisson 95 % interval.

    >>> [round(x, 2) for x in per_10_000(0, 50_000)]
    [0.0, 0.0, 0.74]
    """
    if not steps:
        return 0.0, 0.0, float("inf")
    low = float(stats.chi2.ppf(0.025, 2 * count)) / 2 if count else 0.0
    high = float(stats.chi2.ppf(0.975, 2 * count + 2)) / 2
    scale = 10_000 / steps
    return count * scale, low * scale, high * scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Everything a part is judged by."""

    shares: Sequence[Share]
    alarms: tuple[int, int]
    """Warnings in healthy units, and the healthy units' steps."""
    leads: Sequence[int]
    by_rule: Mapping[str, Sequence[str]]
    """Code → the healthy units in which it warned."""
    groups: Mapping[str, Mapping[str, tuple[Share, Share]]]
    """Architecture and optimiser: each group left out of all else, by itself."""
    left_out: Mapping[str, int]
    """Outcome → units that are neither healthy nor failed."""

    @property
    def median_lead(self) -> float | None:
        return median(self.leads) if self.leads else None


def counts(found: Sequence[Judged]) -> Counts:
    """Count what was said of healthy and of failed units."""
    healthy, failed = of(found, "healthy"), of(found, "failed")
    return Counts(
        shares=_shares(
            healthy, failed, [*of(found, "survived"), *of(found, "between")]
        ),
        alarms=(
            sum(len(one.warnings) for one in healthy),
            sum(one.unit.steps for one in healthy),
        ),
        leads=[one.lead for one in failed if one.has_room and one.lead is not None],
        by_rule=_by_rule(healthy),
        groups={
            kind: _by_group(healthy, failed, kind)
            for kind in ("architecture", "optimiser")
        },
        left_out={
            name: len(of(found, name)) for name in ("void", "survived", "between")
        },
    )


def of(found: Iterable[Judged], outcome: str) -> list[Judged]:
    return [one for one in found if one.outcome == outcome]


def _shares(
    healthy: Sequence[Judged], failed: Sequence[Judged], unharmed: Sequence[Judged]
) -> list[Share]:
    harmless = [*healthy, *unharmed]
    foreseen = [one for one in failed if one.has_room]
    kinds: dict[str, list[bool]] = {}
    for one in healthy:
        kinds.setdefault(one.unit.architecture, []).append(bool(one.warnings))
    return [
        _share("healthy units never warned", [not o.warnings for o in healthy], 0.97),
        _share(
            "healthy units never warned by a rule", [not o.by_rules for o in healthy]
        ),
        _share("healthy at the end", [o.state == "healthy" for o in healthy], 0.99),
        _share("architectures never warned", [not any(w) for w in kinds.values()]),
        _share("failing units named", [bool(o.after) for o in failed], 0.92),
        _share(
            "warned before the loss shows it",
            [o.lead is not None and o.lead > 0 for o in foreseen],
            0.70,
        ),
        _share("cause right", [o.cause == "right" for o in failed], 0.90),
        _share("cause wrong", [o.cause == "wrong" for o in failed], 0.03, least=False),
        _share("fact without a cause", [o.cause == "none" for o in failed]),
        _share(
            "units in which a rule said error that failed",
            [o.outcome == "failed" for o in (*harmless, *failed) if o.has_error],
        ),
    ]


def _share(
    what: str, found: Sequence[bool], bar: float | None = None, *, least: bool = True
) -> Share:
    return Share(what=what, count=sum(found), of=len(found), bar=bar, at_least=least)


def _by_rule(healthy: Sequence[Judged]) -> dict[str, list[str]]:
    rules: dict[str, list[str]] = {}
    for one in healthy:
        for code in dict.fromkeys(f.code for f in one.warnings):
            rules.setdefault(code, []).append(one.unit.name)
    return dict(sorted(rules.items(), key=lambda pair: -len(pair[1])))


def _by_group(
    healthy: Sequence[Judged], failed: Sequence[Judged], kind: str
) -> dict[str, tuple[Share, Share]]:
    def group(unit: Unit) -> str:
        return str(getattr(unit, kind))

    return {
        name: (
            _share(
                "warned", [bool(o.warnings) for o in healthy if group(o.unit) == name]
            ),
            _share("named", [bool(o.after) for o in failed if group(o.unit) == name]),
        )
        for name in sorted({group(o.unit) for o in (*healthy, *failed)})
    }
