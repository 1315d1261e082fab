"""``equipoise lab``: experiments with error bars, on a laptop or on a cluster.

Only declarations: ``--help`` must not load torch, so each subcommand imports its work
from ``lab_actions``.
"""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli import epilog
from equipoise.cli.arguments import Json
from equipoise.report.offline_pages import check_folder_path

HELP = "Experiments with error bars: list, run, status, report."
EXAMPLES = ("equipoise lab list", "equipoise lab run prepost --quick")

app = typer.Typer(no_args_is_help=True, add_completion=False)

Name = Annotated[str, typer.Argument(help="An experiment, or `all` reports.")]
Quick = Annotated[bool, typer.Option("--quick", help="The version of minutes.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Where runs go: $EQUIPOISE_LAB or ./lab-runs."),
]
Publish = Annotated[
    Path | None,
    typer.Option(
        help="Write page, figures and raw numbers here as well.",
        callback=lambda path: path and check_folder_path(path),
    ),
]
Data = Annotated[
    Path | None, typer.Option(help="A folder of CIFAR-10's files, for fragility.")
]
Model = Annotated[
    str,
    typer.Option(
        help="For selection: a Hugging Face directory, or a run of the lab with its "
        "weights; MiniLM unless given."
    ),
]


@app.command("list", epilog=epilog("equipoise lab list", "equipoise lab list --json"))
def list_experiments(*, json: Json = None) -> None:
    """List the experiments."""
    from equipoise_lab.commands import lab_actions

    lab_actions.list_experiments(json=json)


@app.command(
    epilog=epilog(
        "equipoise lab run prepost --quick",
        "equipoise lab run all --publish docs/results",
    )
)
def run(
    name: Name,
    *,
    quick: Quick = False,
    full: Annotated[
        bool, typer.Option("--full", help="For storms: three times the runs.")
    ] = False,
    on: Annotated[str, typer.Option(help="local or ray.")] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time; one per core.")
    ] = None,
    out: Out = None,
    publish: Publish = None,
    data: Data = None,
    model: Model = "",
) -> None:
    """Make every run that is not finished, then report."""
    from equipoise_lab.commands import lab_actions

    lab_actions.run(
        name,
        quick=quick,
        full=full,
        on=on,
        workers=workers,
        out=out,
        publish=publish,
        data=data,
        model=model,
    )


@app.command(epilog=epilog("equipoise lab status"))
def status(
    name: Annotated[str | None, typer.Argument(help="All unless given.")] = None,
    *,
    out: Out = None,
    json: Json = None,
) -> None:
    """Say how far each experiment is."""
    from equipoise_lab.commands import lab_actions

    lab_actions.status(name, out=out, json=json)


@app.command(epilog=epilog("equipoise lab report prepost"))
def report(
    name: Name,
    *,
    quick: Quick = False,
    out: Out = None,
    publish: Publish = None,
    data: Data = None,
) -> None:
    """Show tables and the finding, and write the page."""
    from equipoise_lab.commands import lab_actions

    lab_actions.report(name, quick=quick, out=out, publish=publish, data=data)


@app.command(epilog=epilog("equipoise lab theorem"))
def theorem(*, publish: Publish = None) -> None:
    """Emadi's Fig. 3: brute force, exact θ and the paper's heuristic side by side."""
    from equipoise_lab.commands import lab_actions

    lab_actions.theorem(publish=publish)
