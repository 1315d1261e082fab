"""Runs on a terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.report.listing import Listed
from equipoise.report.views import Found, Report

COLOURS = {"info": "cyan", "warn": "yellow", "error": "bold red"}


def print_listing(rows: Sequence[Listed], console: Console | None = None) -> None:
    """Print one line per run."""
    table = Table("run", "created", "last step", "findings", "file", box=None)
    for row in rows:
        step = "none yet" if row.last_step is None else str(row.last_step)
        counts = Text(row.trouble, "red") if row.trouble else _counts(row.severities)
        table.add_row(row.name, row.created, step, counts, str(row.path))
    (console or Console()).print(table)


def _counts(severities: Mapping[str, int]) -> Text:
    parts = [
        Text(f"{severities[kind]} {kind}", colour)
        for kind, colour in reversed(COLOURS.items())
        if severities.get(kind)
    ]
    return Text(", ").join(parts) if parts else Text("none")


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the verdict, the numbers side by side, and the findings."""
    screen = console or Console()
    tone = COLOURS.get(report.severity, "green")
    screen.print(Text(report.verdict, tone))
    table = Table("", *(run.label for run in report.runs), box=None)
    for name, cells in report.table:
        table.add_row(name, *cells)
    screen.print(table)
    for found in report.findings:
        screen.print(_finding(found))
    if report.unlisted:
        screen.print(f"{report.unlisted} more findings are in the run files")


def _finding(found: Found) -> Text:
    f = found.finding
    place = f" {f.site}" if f.site else ""
    line = Text(f"{f.severity:5} ", COLOURS[f.severity])
    line.append(f"{found.run}, step {f.step}{place}: ", "bold")
    line.append(f.message)
    return line.append(f" Try: {f.advice}", "italic") if f.advice else line
