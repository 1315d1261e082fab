"""A report as pure data: what every renderer shows, in the order it shows it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from equipoise.records import Finding, RunInfo
from equipoise.report import over_training
from equipoise.report.panel import Panel, Runs
from equipoise.report.per_layer import layers
from equipoise.report.table import Rows, table
from equipoise.store import Run

RANK = {"error": 0, "warn": 1, "info": 2}
SHOWN = 60
"""Findings listed per run: a page is for reading, the run file keeps them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A finding, and the run it belongs to."""

    run: str
    finding: Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a run is, for the end of the page."""

    label: str
    file: str
    info: RunInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One page, or one screen."""

    title: str
    verdict: str
    severity: str
    """The worst among the findings, or ``ok``."""
    table: Rows
    panels: list[Panel]
    findings: list[Found]
    """The gravest first, then by step."""
    unlisted: int
    """How many more findings the run files hold."""
    runs: list[About]


def view(
    runs: Runs,
    *,
    title: str | None = None,
    verdict: str | None = None,
    severity: str | None = None,
) -> Report:
    """Return the report of some runs side by side.

    Args:
        runs: What each is called → the run.
        title: By default the names.
        verdict: By default the gravest finding of each.
        severity: Of the verdict; by default the worst among the findings. A verdict
            that was given is not called fine because nothing else was found.
    """
    found = _findings(runs)
    shown = [f for label in runs for f in _of(label, found)[:SHOWN]]
    return Report(
        title=title or " and ".join(runs),
        verdict=verdict or default_verdict(runs, found),
        severity=severity or _severity(found, given=verdict is not None),
        table=table(runs),
        panels=panels(runs),
        findings=sorted(shown, key=_gravity),
        unlisted=len(found) - len(shown),
        runs=[
            About(label=label, file=run.path.name, info=run.info)
            for label, run in runs.items()
        ],
    )


def _severity(found: Sequence[Found], *, given: bool) -> str:
    if found:
        return found[0].finding.severity
    return "info" if given else "ok"


def panels(runs: Runs) -> list[Panel]:
    """Return the four figures."""
    over = (over_training.loss, over_training.gradient, over_training.theta)
    return [figure(runs) for figure in (*over, layers)]


def labelled(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs under their names, numbered where names repeat."""
    found: dict[str, Run] = {}
    for run in runs:
        label, n = run.info.name, 2
        while label in found:
            label, n = f"{run.info.name} ({n})", n + 1
        found[label] = run
    return found


def default_verdict(runs: Runs, found: Sequence[Found]) -> str:
    """Return the gravest finding of each run in a sentence, or that there is none."""
    return "\n".join(_sentence(label, _of(label, found)) for label in runs)


def _sentence(label: str, own: Sequence[Found]) -> str:
    if not own:
        return f"{label}: nothing found."
    worst = own[0].finding
    more = f" ({len(own) - 1} more)" if len(own) > 1 else ""
    return f"{label}: {worst.message.rstrip('.')}, from step {worst.step}{more}."


def _findings(runs: Runs) -> list[Found]:
    found = (
        Found(run=label, finding=f) for label, r in runs.items() for f in r.findings
    )
    return sorted(found, key=_gravity)


def _gravity(found: Found) -> tuple[int, int]:
    return RANK[found.finding.severity], found.finding.step


def _of(label: str, found: Iterable[Found]) -> list[Found]:
    return [f for f in found if f.run == label]
