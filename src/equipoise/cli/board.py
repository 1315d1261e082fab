"""``equipoise board``: a local page of live and finished runs."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.store import runs_directory

EXAMPLES = (
    "equipoise board",
    "equipoise board sweeps --port 8400",
)


def command(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of the runs; $EQUIPOISE_RUNS or ./runs by default."
        ),
    ] = None,
    *,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port; 8321, or the next free one, by default."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The interface to listen on.")
    ] = "127.0.0.1",
    expose: Annotated[
        bool,
        typer.Option(
            "--expose", help="Allow a --host that other machines reach; needs a token."
        ),
    ] = False,
    browser: Annotated[
        bool, typer.Option(help="Open the page in your browser.")
    ] = True,
) -> None:
    """Show live and finished runs in your browser."""
    # Here, not above: --help must not wait for a web server.
    from equipoise.web.server import BoardOptions, open_browser, prepared

    options = BoardOptions(
        directory=directory or runs_directory(),
        host=host,
        port=port,
        expose=expose,
        browser=browser,
    )
    board = prepared(options)
    typer.echo(f"board of {options.directory} at {board.address}  (Ctrl-C ends it)")
    for address in board.others:
        typer.echo(f"the same at {address}")
    if options.browser:
        open_browser(board.address)
    board.run()
