"""``equipoise remedies``: every remedy, what it does, when it fits, how to apply it."""

import json as jsonlib
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from equipoise.cli.arguments import Json, put_json
from equipoise.judging.remedy_catalogue import CATALOGUE

EXAMPLES = ("equipoise remedies", "equipoise remedies --json")


def command(
    *,
    json: Json = None,
) -> None:
    """List the remedies: what each does, and the troubles it fits."""
    entries = CATALOGUE.values()
    rows = [{**asdict(entry), "page": entry.page} for entry in entries]
    if json and put_json(jsonlib.dumps(rows, ensure_ascii=False), json):
        return
    table = Table(box=None)
    table.add_column("remedy", no_wrap=True)
    table.add_column("does")
    table.add_column("fits")
    for entry in entries:
        table.add_row(entry.name, entry.does, entry.fits)
    screen = Console()
    screen.print(table)
    screen.print(
        "Apply one: remedy(NAME).apply(model, optimizer), from "
        "equipoise.remedies.catalogue; docs/remedies/ has a page for each",
        highlight=False,
        markup=False,
    )
