"""``equipoise lab``: experiments with error bars, on a laptop or on a cluster."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from equipoise.claims.emadi_figure3 import figure3
from equipoise.errors import EquipoiseError
from equipoise.lab.conclusions import conclusion
from equipoise.lab.display import bars, table
from equipoise.lab.experiment import Experiment
from equipoise.lab.options import one_of
from equipoise.lab.pages import write_page
from equipoise.lab.published import comparison
from equipoise.lab.recipes import RECIPES, recipe
from equipoise.lab.results import results
from equipoise.lab.runner import Where, lab_directory, run_experiment, standing

app = typer.Typer(no_args_is_help=True, add_completion=False)

Name = Annotated[str, typer.Argument(help="An experiment; `equipoise lab list`.")]
Quick = Annotated[bool, typer.Option("--quick", help="The version of minutes.")]
Out = Annotated[
    Path | None, typer.Option(help="Where runs go; $EQUIPOISE_LAB or ./lab by default.")
]


@app.command("list")
def list_experiments() -> None:
    """List the experiments."""
    console = Console()
    for name in RECIPES:
        full, quick = recipe(name), recipe(name, quick=True)
        runs = f"{len(full.tasks)} runs, {len(quick.tasks)} quick"
        console.print(f"[bold]{name}[/]  {full.question}  ({runs})", highlight=False)


@app.command()
def run(
    name: Name,
    *,
    quick: Quick = False,
    on: Annotated[str, typer.Option(help="local or ray.")] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time; one per core.")
    ] = None,
    out: Out = None,
) -> None:
    """Make every run that is not finished, then report."""
    experiment, console = recipe(name, quick=quick), Console()
    one_of("--on", on, ("local", "ray"))
    where: Where = "ray" if on == "ray" else "local"
    root = _root(experiment, out)
    left = standing(experiment, root).left
    with bars(len(left), console=console) as watcher:
        failures = run_experiment(
            experiment, root, on=where, workers=workers, watcher=watcher
        )
    for failure in failures:
        task = failure.task
        console.print(f"[red]{task.arm.name} {task.seed}: {failure.reason}")
    _report(experiment, root, console)
    if failures:
        raise EquipoiseError(f"{len(failures)} of {len(left)} runs failed")


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="All unless given.")] = None,
    *,
    out: Out = None,
) -> None:
    """Say how far each experiment is."""
    console = Console()
    for one in [name] if name else RECIPES:
        for experiment in (recipe(one), recipe(one, quick=True)):
            found = standing(experiment, _root(experiment, out))
            total = len(experiment.tasks)
            console.print(f"{experiment.name}: {len(found.done)} of {total} runs done")


@app.command()
def report(name: Name, *, quick: Quick = False, out: Out = None) -> None:
    """Show the table and the finding, and write the page."""
    experiment = recipe(name, quick=quick)
    _report(experiment, _root(experiment, out), Console())


@app.command()
def theorem() -> None:
    """Emadi's Fig. 3: brute force, exact θ and the paper's heuristic side by side."""
    shown = Table("keys", "τ", "‖J‖, mean", "θ/τ, worst", "heuristic, worst", "wrong")
    for point in figure3():
        shown.add_row(
            str(point.keys),
            f"{point.tau:g}",
            f"{point.norm:.4g}",
            f"{point.theta_error:.1e}",
            f"{point.heuristic_error:.1e}",
            f"{point.heuristic_wrong:.0%}",
        )
    Console().print(shown)


def _root(experiment: Experiment, out: Path | None) -> Path:
    return (out or lab_directory()) / experiment.name


def _report(experiment: Experiment, root: Path, console: Console) -> None:
    rows = results(experiment, root)
    said = conclusion(experiment, rows)
    console.print(table(experiment, rows))
    if experiment.name.startswith("prepost"):
        console.print(comparison(rows))
    console.print(said, highlight=False)
    page = write_page(experiment, root, rows, verdict=said)
    console.print(f"page: {page}", soft_wrap=True)
