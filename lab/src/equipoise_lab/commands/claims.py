"""``equipoise claims``: what the four papers state, checked now, with its evidence."""

import json as encoding
import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from equipoise.cli.arguments import Html, Json, put_json, with_options

if TYPE_CHECKING:
    from equipoise_lab.claims.result import ClaimResult

COLOURS = {
    "holds": "green",
    "pattern reproduced": "green",
    "refuted": "red",
    "pattern not reproduced": "red",
    "not checkable here": "dim",
}


HELP = "Check what the four papers state; say what can be relied on."
EXAMPLES = ("equipoise claims --list", "equipoise claims --paper emadi --evidence")

CHOICE = {
    "paper": (str, "Only this paper: emadi, mudarisov, petrov, …"),
    "claim": (str, "Only claims whose id contains this text."),
}


@with_options(CHOICE, before="json")
def command(
    *,
    json: Json = None,
    html: Html = None,
    evidence: Annotated[
        bool, typer.Option(help="Print the numbers under each verdict.")
    ] = False,
    full: Annotated[
        bool,
        typer.Option(
            "--full/--quick",
            help="Run the experiments again first (hours, resumable) and search "
            "longer; else committed results are judged.",
        ),
    ] = False,
    only_list: Annotated[
        bool, typer.Option("--list", help="List the claims without checking them.")
    ] = False,
    **choice: str,
) -> None:
    """Check what the four papers state, and say what of it can be relied on."""
    # Here, not above: --help must not load torch.
    from equipoise_lab.claims import catalogue

    chosen = catalogue.select(**choice)
    if only_list:
        for one in chosen:
            typer.echo(f"{one.id:58} {one.where}")
        return
    if full:
        _run_experiments([one.id for one in chosen])
    console, progress = Console(), Console(stderr=True)
    with progress.status(f"checking {len(chosen)} claims") as status:
        results = catalogue.run(
            chosen,
            progress=lambda one: status.update(f"checking {one.id}"),
            thorough=full,
        )
    if json is None or not put_json(catalogue.as_json(results), json):
        console.print(_table(results), highlight=False)
        if evidence:
            _print_evidence(console, results)
        console.print(catalogue.summary(results), highlight=False)
    if html is not None:
        from equipoise_lab.claims.page import write_claims

        typer.echo(f"wrote {write_claims(results, html)}")


def _run_experiments(ids: list[str]) -> None:
    """Run what the claims are judged by, and have them judged by the new results."""
    from equipoise_lab.claims.published_results import EXPERIMENTS, VARIABLE
    from equipoise_lab.commands import lab_actions
    from equipoise_lab.running.runner import lab_directory
    from equipoise_lab.studies.catalogue import RECIPES

    folder = lab_directory() / "claims"
    named = dict.fromkeys(EXPERIMENTS[one] for one in ids if one in EXPERIMENTS)
    sizes = [f"{name}-sizes" for name in named if f"{name}-sizes" in RECIPES]
    for name in (*named, *sizes):
        lab_actions.run(
            name,
            quick=False,
            full=False,
            on="local",
            workers=None,
            out=None,
            publish=folder,
            data=None,
            model="",
        )
    os.environ[VARIABLE] = str(folder)


def _table(results: list["ClaimResult"]) -> Table:
    table = Table("where", "what is claimed", "verdict", "what is true")
    for one in results:
        colour = COLOURS.get(one.verdict, "yellow")
        table.add_row(
            f"{one.paper}\n{one.where}",
            one.statement,
            f"[{colour}]{one.verdict}[/]",
            one.instead,
        )
    return table


def _print_evidence(console: Console, results: list["ClaimResult"]) -> None:
    for one in results:
        console.print(f"\n{one.id}: {one.verdict}", highlight=False)
        for name, value in one.evidence.items():
            console.print(f"  {name}: {encoding.dumps(value)}", highlight=False)
