"""Runs on a terminal: a report of some, or a listing of a directory, one line each."""

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.errors import RunFileError
from equipoise.judging.card import Card
from equipoise.judging.verdict import Verdict
from equipoise.report.judged import judged_json
from equipoise.report.live_screen import duration
from equipoise.report.page_model import Json, card_json
from equipoise.report.report_model import Report, RunFinding
from equipoise.store import Run, open_run
from equipoise.store.location import run_files
from equipoise.text.tones import terminal

Options = Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A run in a list; one that cannot be read keeps its line and says why."""

    path: Path
    name: str = ""
    created: str = ""
    last_step: int | None = None
    state: str = ""
    """``live``, ``finished``, or ``stopped`` where the writer died."""
    age: float | None = None
    """Seconds since the last step was recorded."""
    severities: Mapping[str, int] = field(default_factory=dict)
    verdict: Verdict | None = None
    trouble: str = ""


def listing(directory: Path) -> list[ListedRun]:
    """Return the runs of a directory and of those inside it, newest first."""
    return [_listed(path) for path in run_files(directory, recursive=True)]


def _listed(path: Path) -> ListedRun:
    try:
        return _read(path, open_run(path))
    except RunFileError as error:
        return ListedRun(path=path, trouble=str(error))


def _read(path: Path, run: Run) -> ListedRun:
    steps = run.steps
    return ListedRun(
        path=path,
        name=run.info.name,
        created=run.info.created,
        last_step=int(steps[-1]) if len(steps) else None,
        state=run.state,
        age=None if run.last_time is None else max(0.0, time.time() - run.last_time),
        severities=dict(Counter(finding.severity for finding in run.findings)),
        verdict=run.verdict,
    )


WIDE = 10_000


def print_listing(rows: Sequence[ListedRun]) -> None:
    """Print one line per run; no path is cut, on a terminal or in a pipe."""
    table = Table("run", "state", "age", "steps", "verdict", box=None)
    table.add_column("file", overflow="fold")
    for row in rows:
        step = "none yet" if row.last_step is None else str(row.last_step + 1)
        age = "" if row.age is None else duration(row.age)
        cells = (row.state, age, step, _state(row), Text(str(row.path)))
        table.add_row(Text(row.name), *cells)
    width = None if sys.stdout.isatty() else WIDE
    Console(width=width).print(table)


def listing_json(rows: Sequence[ListedRun]) -> str:
    """Return the runs as one JSON object, for scripts."""
    judged = ((str(row.path), row.verdict) for row in rows)
    return judged_json("runs", judged, {"runs": [_plain(row) for row in rows]})


def _plain(row: ListedRun) -> dict[str, object]:
    verdict = row.verdict and json.loads(row.verdict.to_json())
    return {**asdict(row), "path": str(row.path), "verdict": verdict}


def _state(row: ListedRun) -> Text:
    """Return the verdict's word, or why there is none."""
    if row.verdict is None:
        return Text(row.trouble, terminal("error"))
    tone = terminal(row.verdict.state)
    since = row.verdict.since
    return Text(row.verdict.state + ("" if since is None else f", step {since}"), tone)


def report_json(report: Report, comparison: Json | None = None) -> str:
    """Return a report as one JSON object: of each run its verdict and its numbers.

    Of several runs also where they part, and which options differ.
    """
    runs = [
        {
            "run": details.label,
            "file": details.file,
            "verdict": json.loads(report.verdicts[details.label].to_json()),
            "card": card_json(report.cards[details.label]),
            "numbers": {name: cells[n] for name, cells in report.table},
        }
        for n, details in enumerate(report.runs)
    ]
    alone = {"verdict": runs[0]["verdict"]} if len(runs) == 1 else {}
    beside = {} if comparison is None else {"comparison": comparison}
    judged = ((run.label, report.verdicts[run.label]) for run in report.runs)
    return judged_json("report", judged, {**alone, "runs": runs, **beside})


def print_report(report: Report, comparison: Json | None = None) -> None:
    """Print the verdict, the numbers side by side, and the findings."""
    screen = Console()
    tone = terminal(report.state)
    screen.print(Text(report.verdict, tone))
    for run in report.runs:
        _print_card(report.cards[run.label], run.label, screen, alone=report)
    table = Table("", *(run.label for run in report.runs), box=None)
    for name, cells in report.table:
        table.add_row(name, *cells)
    screen.print(table)
    if comparison is not None:
        for line in (comparison["loops"]["sentence"], comparison["sentence"]):
            screen.print(Text(line, "bold"), end="\n" if line else "")
        _print_cells("what the loops do", comparison["loops"]["rows"], report, screen)
        _print_cells("options that differ", comparison["options"], report, screen)
    for found in report.findings:
        screen.print(_finding(found, report.verdicts[found.run]))
    if report.unlisted:
        screen.print(f"{report.unlisted} more findings are in the run files")


def _print_card(card: Card, label: str, screen: Console, *, alone: Report) -> None:
    """Print what the loop does; of several runs in three lines each."""
    if not card:
        return
    if len(alone.runs) > 1:
        lines = [f"{label}, {line}" for line in card.opening]
    else:
        lines = str(card).splitlines()
    for line in lines:
        screen.print(Text(line, "dim" if line.startswith(" ") else ""))


MOST_OPTIONS = 12
"""On a terminal; the page has them all."""


def _print_cells(title: str, options: Options, report: Report, screen: Console) -> None:
    """Print in what the runs differ, a column for each."""
    if not options:
        return
    table = Table(title, *(r.label for r in report.runs), box=None)
    for name, cells in options[:MOST_OPTIONS]:
        table.add_row(Text(name), *map(Text, cells))
    screen.print(table)


def _finding(found: RunFinding, verdict: Verdict) -> Text:
    """Return a finding: what held when it fired, and what holds now where it lasts."""
    f = found.finding
    site = f" {f.site}" if f.site else ""
    line = Text(f"{f.severity:5} ", terminal(f.severity))
    line.append(f"{found.run}, step {f.step}{site}: ", "bold")
    line.append(f.message)
    now = verdict.now.get(f.code) if f in verdict.findings else None
    if now is not None and now not in (verdict.lead, *verdict.effects):
        line.append(f" Now: {now.message} (step {now.step}).", "bold")
    return line.append(f" Try: {f.advice}", "italic") if f.advice else line
