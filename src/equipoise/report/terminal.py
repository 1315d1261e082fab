"""Runs on a terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.report.listing import Listed

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
