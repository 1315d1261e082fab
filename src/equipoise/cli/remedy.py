"""``equipoise remedy RUN``: what to try first against what a run's verdict says."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.arguments import Json, opened_run, put_json
from equipoise.judging.remedy_catalogue import RemedyEntry
from equipoise.judging.remedy_choice import remedies_for
from equipoise.report.judged import judged_json

EXAMPLES = ("equipoise remedy", "equipoise remedy runs/mine.eqp --json")


def command(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN|DIR",
            help="A run file, or a folder whose newest run is taken; $EQUIPOISE_RUNS "
            "or ./runs unless given.",
            show_default=False,
        ),
    ] = None,
    *,
    json: Json = None,
) -> None:
    """Name the remedy to try first for a run's verdict, with the code for it."""
    opened = opened_run(run)
    verdict = opened.verdict
    offers = remedies_for(verdict)
    rows = [{**asdict(entry), "page": entry.page} for entry in offers]
    judged = [(opened.info.name, verdict)]
    own = {"sentence": verdict.sentence, "remedies": rows}
    if json and put_json(judged_json("remedy", judged, own), json):
        return
    typer.echo(f"{verdict.state}: {verdict.sentence}")
    typer.echo(_advice(offers))


def _advice(offers: list[RemedyEntry]) -> str:
    if not offers:
        return "nothing to apply; equipoise remedies lists what there is"
    first, *others = offers
    lines = [
        f"try first: {first.name}: {first.does} ({first.page})",
        "",
        *(f"    {line}" for line in first.code.splitlines()),
    ]
    if others:
        rest = "; ".join(f"{entry.name}: {entry.does}" for entry in others)
        lines += ["", f"if that does not help: {rest}"]
    return "\n".join(lines)
