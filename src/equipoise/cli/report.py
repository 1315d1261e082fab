"""``equipoise report RUN …``: what happened in one run, or in several side by side."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.report.pages import check_page_path
from equipoise.report.terminal import print_report
from equipoise.report.views import labelled, view
from equipoise.store import open_run, runs_directory
from equipoise.store.location import newest


def command(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run files; the newest of the runs directory unless given."
        ),
    ] = None,
    *,
    html: Annotated[
        Path | None,
        typer.Option(help="Write one self-contained offline page to this file."),
    ] = None,
) -> None:
    """Show runs here, or write them into one offline HTML page."""
    if html is not None:
        check_page_path(html)
    opened = labelled([open_run(path) for path in runs or [newest(runs_directory())]])
    if html is None:
        print_report(view(opened))
        return
    from equipoise.report.html import write_report  # plotly: only for a page

    typer.echo(f"wrote {write_report(opened, html)}")
