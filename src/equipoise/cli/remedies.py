"""``equipoise remedies``: every remedy, what it does, when it fits, how to apply it."""

import json as jsonlib
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from equipoise.judging.remedy_catalogue import CATALOGUE, parsed, rescues

EXAMPLES = ("equipoise remedies", "equipoise remedies --json")
NOT = "not tried"


def _measured(name: str) -> dict[str, str]:
    """Return form of the remedy and family → runs rescued."""
    return {
        family if label == name else f"{family}, {label}": str(cell)
        for label, families in rescues().items()
        if parsed(label)[0] == name
        for family, cell in families.items()
    }


def command(
    *,
    json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
) -> None:
    """List the remedies: what each does, and the troubles it fits."""
    entries = CATALOGUE.values()
    if json:
        rows = [
            {**asdict(entry), "page": entry.page, "measured": _measured(entry.name)}
            for entry in entries
        ]
        typer.echo(jsonlib.dumps(rows, ensure_ascii=False))
        return
    table = Table(box=None)
    table.add_column("remedy", no_wrap=True)
    table.add_column("does")
    table.add_column("fits")
    table.add_column("failing runs rescued, by family (95 % interval)")
    for entry in entries:
        lines = [f"{k}: {v}" for k, v in _measured(entry.name).items()]
        table.add_row(entry.name, entry.does, entry.fits, "\n".join(lines or [NOT]))
    screen = Console()
    screen.print(table)
    screen.print(
        "Apply one: remedy(NAME).apply(model, optimizer), from "
        "equipoise.remedies.catalogue; docs/remedies/ has a page for each",
        highlight=False,
        markup=False,
    )
