"""``equipoise report RUN …``: one run, or several side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.arguments import Json, opened_run, put_json
from equipoise.cli.progress import working
from equipoise.errors import InputError
from equipoise.judging.verdict import STATES, State
from equipoise.report.comparison import compared
from equipoise.report.offline_pages import check_page_path
from equipoise.report.report_model import labelled, view, worst
from equipoise.report.terminal import print_report, report_json
from equipoise.store import Run

EXAMPLES = (
    "equipoise report",
    "equipoise report runs/mine.eqp --html page.html",
    "equipoise report runs/a.eqp runs/b.eqp --json",
    "equipoise report runs/ci.eqp --fail-on failing",
)


def command(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN|DIR...",
            help="Run files, or folders whose newest run is taken; $EQUIPOISE_RUNS or "
            "./runs unless given.",
            show_default=False,
        ),
    ] = None,
    *,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="[FILE.html]",
            help="Write one offline page, to report.html if no file is named.",
        ),
    ] = None,
    json: Json = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            help="Exit with code 6 if a verdict is this bad or worse: "
            "not-judged, at-risk (or warn), failing (or error), dead."
        ),
    ] = None,
) -> None:
    """Show runs here, or write them into one offline HTML page."""
    limit = None if fail_on is None else _limit(fail_on)
    if html is not None:
        check_page_path(html)
    given: list[Path | None] = [*runs] if runs else [None]
    opened = labelled([opened_run(path) for path in given])
    with working("reading the runs"):
        page = None if html is None else _page(opened, html)
        found = None if page else (view(opened), _comparison(opened))
    if found is None:
        typer.echo(f"wrote {page}")
    elif json is None or not put_json(report_json(*found), json):
        print_report(*found)
    if limit is not None and _is_bad(opened, limit):
        raise typer.Exit(BAD_VERDICT)


def _page(runs: Mapping[str, Run], path: Path) -> Path:
    from equipoise.report.html import write_report  # jinja2: only for a page

    return write_report(runs, path)


def _comparison(runs: Mapping[str, Run]) -> dict[str, Any] | None:
    """Return the differences between several runs; the first is the baseline."""
    return compared(runs) if len(runs) > 1 else None


BAD_VERDICT = 6
LIMITS: dict[str, State] = {
    "not-judged": "not judged",
    "at-risk": "at risk",
    "warn": "at risk",
    "failing": "failing",
    "error": "failing",
    "dead": "dead",
}


def _limit(given: str) -> State:
    name = given.replace(" ", "-")  # as a verdict writes it: "at risk"
    if name not in LIMITS:
        raise InputError(f"--fail-on {given}: choose one of {', '.join(LIMITS)}")
    return LIMITS[name]


def _is_bad(runs: Mapping[str, Run], limit: State) -> bool:
    found = worst(run.verdict for run in runs.values())
    return STATES.index(found) >= STATES.index(limit)
