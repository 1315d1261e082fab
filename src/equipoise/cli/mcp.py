"""``equipoise mcp``: runs for agents, over standard input and output."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.errors import RunFileError
from equipoise.store import runs_directory

EXAMPLES = ("equipoise mcp", "equipoise mcp sweeps")


def command(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="Where the runs are; $EQUIPOISE_RUNS or ./runs if not given."
        ),
    ] = None,
) -> None:
    """Let an agent read runs: a server of the Model Context Protocol, read-only."""
    place = directory or runs_directory()
    if not place.is_dir():
        raise RunFileError(f"{place}: no such directory of runs")
    # Here, not above: --help must not need the extra.
    from equipoise.mcp.server import server

    server(place).run("stdio")
