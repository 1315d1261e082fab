"""The field's counts on the terminal, as JSON, and as the page's table."""

from typing import Any

from rich.console import Group
from rich.table import Table

from equipoise_lab.storms.field.bars import (
    LEAD_BAR,
    RATE_BAR,
    Counts,
    Share,
    per_10_000,
)
from equipoise_lab.storms.field.judged import Judged


def as_json(found: Counts) -> dict[str, Any]:
    """Return the counts as plain values."""
    rate, low, high = per_10_000(*found.alarms)
    return {
        "shares": [_json(share) for share in found.shares],
        "false_alarms": {
            "count": found.alarms[0],
            "steps": found.alarms[1],
            "per_10000": rate,
            "interval": [low, high],
            "bar": RATE_BAR,
            "decision": _rate_decision(low, high),
        },
        "median_lead": found.median_lead,
        "lead_bar": LEAD_BAR,
        "by_rule": {code: list(units) for code, units in found.by_rule.items()},
        "groups": {
            kind: {name: [_json(a), _json(b)] for name, (a, b) in rows.items()}
            for kind, rows in found.groups.items()
        },
        "left_out": dict(found.left_out),
    }


def line_of(one: Judged) -> dict[str, Any]:
    """Return what was said of one unit, and what became of it, as plain values."""
    first: dict[str, int] = {}
    for finding in one.warnings:
        first.setdefault(finding.code, finding.step)
    return {
        "unit": one.unit.name,
        "kind": [one.unit.architecture, one.unit.optimiser, one.unit.task],
        "fault": one.unit.fault,
        "onset": one.unit.onset,
        "outcome": one.outcome,
        "shown": one.shown,
        "lead": one.lead,
        "state": one.state,
        "headline": one.headline,
        "cause": one.cause if one.unit.fault else "",
        "warned": first,
    }


def _json(share: Share) -> dict[str, Any]:
    return {
        "what": share.what,
        "count": share.count,
        "of": share.of,
        "interval": list(share.interval),
        "bar": share.bar,
        "decision": share.decision,
    }


def _rate_decision(low: float, high: float) -> str:
    if high <= RATE_BAR:
        return "met"
    return "not met" if low > RATE_BAR else "not decided"


def field_tables(found: Counts) -> Group:
    """Return the tables: bars, groups that were left out in turn, false alarms."""
    rate, low, high = per_10_000(*found.alarms)
    bars = Table("what", "units", "95 %", "bar", title="The field")
    for share in found.shares:
        bars.add_row(share.what, *_cells(share), _bar(share))
    bars.add_row(
        "false alarms per 10,000 steps",
        f"{rate:.1f}",
        f"{low:.1f} to {high:.1f}",
        f"at most {RATE_BAR:g}: {_rate_decision(low, high)}",
    )
    lead = found.median_lead
    bars.add_row("median lead, steps", "–" if lead is None else f"{lead:g}", "", "")
    left = ", ".join(f"{count} {name}" for name, count in found.left_out.items())
    bars.caption = f"neither healthy nor failed: {left}"
    return Group(bars, *(_groups(kind, found) for kind in found.groups), _rules(found))


def _cells(share: Share) -> tuple[str, str]:
    low, high = share.interval
    return f"{share.count} of {share.of}", f"{100 * low:.1f} to {100 * high:.1f} %"


def _bar(share: Share) -> str:
    if share.bar is None:
        return ""
    side = "at least" if share.at_least else "at most"
    return f"{side} {100 * share.bar:.0f} %: {share.decision}"


def _groups(kind: str, found: Counts) -> Table:
    title = f"One {kind} at a time, the others left out"
    table = Table(
        kind, "healthy, warned", "95 %", "failing, named", "95 %", title=title
    )
    for name, (warned, named) in found.groups[kind].items():
        table.add_row(name, *_cells(warned), *_cells(named))
    return table


def _rules(found: Counts) -> Table:
    table = Table("rule or check", "units", title="Healthy units warned, by rule")
    for code, units in found.by_rule.items():
        table.add_row(code, str(len(units)))
    return table
