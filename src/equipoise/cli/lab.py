"""``equipoise lab``: experiments with error bars, on a laptop or on a cluster."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from equipoise.claims.emadi_theta import theorem_evidence
from equipoise.errors import EquipoiseError
from equipoise.lab.options import one_of
from equipoise.lab.results import publishing
from equipoise.lab.results.arms import rows
from equipoise.lab.results.evidence import Evidence, gather
from equipoise.lab.results.pages import bars, tables, write_page
from equipoise.lab.running.experiment import Experiment
from equipoise.lab.running.runner import (
    Where,
    lab_directory,
    preflight,
    run_experiment,
    standing,
)
from equipoise.lab.studies.findings import finding
from equipoise.lab.studies.fragility.runner import QUESTION, Study
from equipoise.lab.studies.recipes import FRAGILITY, RECIPES, REPORTS, recipe
from equipoise.lab.studies.selection.paper import figures_of, kept_figures
from equipoise.report.pages import folder_place

app = typer.Typer(no_args_is_help=True, add_completion=False)

ALL, SELECTION = "all", "selection"
Quick = Annotated[bool, typer.Option("--quick", help="The version of minutes.")]
Out = Annotated[
    Path | None, typer.Option(help="Where runs go; $EQUIPOISE_LAB or ./lab by default.")
]
Publish = Annotated[
    Path | None,
    typer.Option(
        help="Keep page, figures and raw numbers here as well.",
        callback=lambda path: path and folder_place(path),
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


@app.command("list")
def list_experiments() -> None:
    """List the experiments."""
    console = Console()
    for name in RECIPES:
        full, quick = recipe(name), recipe(name, quick=True)
        runs = f"{len(full.tasks)} runs, {len(quick.tasks)} quick"
        console.print(f"[bold]{name}[/]  {full.question}  ({runs})", highlight=False)
    runs = f"{len(Study().plan)} runs, {len(Study(quick=True).plan)} quick"
    console.print(f"[bold]{FRAGILITY}[/]  {QUESTION}  ({runs})", highlight=False)


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="An experiment, or `all` reports.")],
    *,
    quick: Quick = False,
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
    one_of("--on", on, ("local", "ray"))
    where: Where = "ray" if on == "ray" else "local"
    home, failed = folder_place(out or lab_directory()), 0
    experiments = [recipe(one, quick=quick) for one in _named(name)]
    study = Study(quick=quick, cifar10=data)
    # First what is cheap to refuse: the rest takes minutes or hours.
    study.check()
    for experiment in experiments if where == "local" else ():
        preflight(standing(experiment, home / experiment.name).left)
    if name in (ALL, SELECTION):
        _shown(figures_of(model, home, quick=quick), publish)
    for experiment in experiments:
        failed += _run(experiment, out, where=where, workers=workers)
        _report(experiment, out, publish)
    if name == ALL:
        theorem(publish=publish)
    if name in (ALL, FRAGILITY):
        root = home / study.name
        study.run(root, workers=workers, say=Console().print)
        _shown(study.evidence(root), publish)
    if failed:
        raise EquipoiseError(f"{failed} runs failed")


def _named(name: str) -> tuple[str, ...]:
    if name == FRAGILITY:
        return ()
    return REPORTS if name == ALL else (name,)


def _run(
    experiment: Experiment, out: Path | None, *, where: Where, workers: int | None
) -> int:
    """Make the runs that are left; return how many failed."""
    console, root = Console(), _root(experiment, out)
    left = standing(experiment, root).left
    with bars(len(left), console=console) as watcher:
        failures = run_experiment(
            experiment, root, on=where, workers=workers, watcher=watcher
        )
    for failure in failures:
        task = failure.task
        console.print(f"[red]{task.arm.name} {task.seed}: {failure.reason}")
    return len(failures)


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="All unless given.")] = None,
    *,
    out: Out = None,
) -> None:
    """Say how far each experiment is."""
    console = Console()
    for study in (Study(), Study(quick=True)) if name in (None, FRAGILITY) else ():
        done = len(study.finished((out or lab_directory()) / study.name))
        console.print(f"{study.name}: {done} of {len(study.plan)} runs done")
    if name == FRAGILITY:
        return
    for one in [name] if name else RECIPES:
        for experiment in (recipe(one), recipe(one, quick=True)):
            found = standing(experiment, _root(experiment, out))
            total = len(experiment.tasks)
            console.print(f"{experiment.name}: {len(found.done)} of {total} runs done")


@app.command()
def report(
    name: Annotated[str, typer.Argument(help="An experiment, or `all` reports.")],
    *,
    quick: Quick = False,
    out: Out = None,
    publish: Publish = None,
    data: Data = None,
) -> None:
    """Show tables and the finding, and write the page."""
    if name in (ALL, SELECTION) and (kept := kept_figures(out or lab_directory())):
        _shown(kept, publish)
    for one in _named(name):
        _report(recipe(one, quick=quick), out, publish)
    if name in (ALL, FRAGILITY):
        study = Study(quick=quick, cifar10=data)
        _shown(study.evidence((out or lab_directory()) / study.name), publish)


@app.command()
def theorem(*, publish: Publish = None) -> None:
    """Emadi's Fig. 3: brute force, exact θ and the paper's heuristic side by side."""
    _shown(theorem_evidence(), publish)


def _root(experiment: Experiment, out: Path | None) -> Path:
    return (out or lab_directory()) / experiment.name


def _report(experiment: Experiment, out: Path | None, to: Path | None) -> None:
    root = _root(experiment, out)
    evidence = gather(experiment, root)
    _shown(evidence, to)
    if to is not None:
        publishing.keep_pictures(experiment, root, to / evidence.name)
    said = finding(evidence).verdict
    page = write_page(experiment, root, rows(evidence), verdict=said)
    Console().print(f"page: {page}", soft_wrap=True)


def _shown(evidence: Evidence, to: Path | None) -> None:
    """Print what the evidence says and, if asked, keep it as a page."""
    console, found = Console(), finding(evidence)
    for shown in tables(evidence.question, found):
        console.print(shown)
    console.print(found.verdict, highlight=False)
    if to is not None:
        place = publishing.publish(evidence, to / evidence.name)
        publishing.index(to)
        console.print(f"published: {place}", soft_wrap=True)
