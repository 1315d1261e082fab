"""``equipoise runs``: what has been recorded here."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.arguments import Json, put_json
from equipoise.cli.progress import working
from equipoise.errors import RunFileError
from equipoise.report.terminal import listing, listing_json, print_listing
from equipoise.store import runs_directory

EXAMPLES = (
    "equipoise runs",
    "equipoise runs sweeps --json",
)


def command(
    directory: Annotated[
        Path | None,
        typer.Argument(help="Where to look; $EQUIPOISE_RUNS or ./runs unless given."),
    ] = None,
    *,
    json: Json = None,
) -> None:
    """List the runs of a directory and of those inside it, newest first."""
    place = directory or runs_directory()
    if not place.is_dir():
        raise RunFileError(f"{place}: no such directory of runs")
    with working("reading the runs"):
        found = listing(place)
    if json is None or not put_json(listing_json(found), json):
        print_listing(found)
