"""The work behind the subcommands of ``equipoise lab``, which ``lab`` declares."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from equipoise.cli.arguments import as_json, put_json
from equipoise.errors import EquipoiseError
from equipoise.report.offline_pages import check_folder_path
from equipoise_lab.claims.emadi import theorem_evidence
from equipoise_lab.options import one_of
from equipoise_lab.results import publishing
from equipoise_lab.results.evidence import Evidence, gather
from equipoise_lab.results.finding import rows
from equipoise_lab.results.publishing import bars, tables, write_page
from equipoise_lab.running.experiment import Experiment
from equipoise_lab.running.runner import lab_directory, preflight, run_experiment
from equipoise_lab.running.workers import Failure, Job, Where, run_jobs, standing
from equipoise_lab.storms.labels import labels
from equipoise_lab.storms.plan import FULL, NORMAL, QUICK, Size, plan
from equipoise_lab.storms.runs import make
from equipoise_lab.storms.tables import label_table
from equipoise_lab.studies.catalogue import (
    FRAGILITY,
    RECIPES,
    REPORTS,
    STORMS,
    finding,
    recipe,
)
from equipoise_lab.studies.fragility.runner import QUESTION, Study
from equipoise_lab.studies.selection.paper import NAME as PAPER
from equipoise_lab.studies.selection.paper import figures_of, saved_figures

ALL, SELECTION, THEOREM = "all", "selection", "theorem"


def list_experiments(*, json: Path | None) -> None:
    """Print the name, question and number of runs of every experiment."""
    rows: list[tuple[str, str, int, int]] = []
    for name in RECIPES:
        full, quick = recipe(name), recipe(name, quick=True)
        rows.append((name, full.question, len(full.tasks), len(quick.tasks)))
    long, short = Study(), Study(quick=True)
    rows.append((FRAGILITY, QUESTION, len(long.tasks), len(short.tasks)))
    question = "Which readings foresee that a training run fails?"
    rows.append((STORMS, question, len(plan(NORMAL)), len(plan(QUICK))))
    keys = ("name", "question", "runs", "quick_runs")
    result = as_json({"experiments": [dict(zip(keys, r, strict=True)) for r in rows]})
    if json and put_json(result, json):
        return
    for name, question, runs, few in rows:
        Console().print(
            f"[bold]{name}[/]  {question}  ({runs} runs, {few} quick)",
            highlight=False,
        )


def run(
    name: str,
    *,
    quick: bool,
    full: bool,
    on: str,
    workers: int | None,
    out: Path | None,
    publish: Path | None,
    data: Path | None,
    model: str,
) -> None:
    """Make every run that is not finished, then report."""
    one_of("--on", on, ("local", "ray"))
    where: Where = "ray" if on == "ray" else "local"
    home, failed = check_folder_path(out or lab_directory()), 0
    experiments = [recipe(one, quick=quick) for one in _named(name)]
    study = Study(quick=quick, cifar10=data)
    # First what is cheap to refuse: the rest takes minutes or hours.
    study.check()
    for experiment in experiments if where == "local" else ():
        preflight(standing(experiment.tasks, home / experiment.name).left)
    if name in (ALL, SELECTION, PAPER):
        _show(figures_of(model, home, quick=quick), publish)
    for experiment in experiments:
        failed += _run(experiment, out, where=where, workers=workers)
        _report(experiment, out, publish)
    if name in (ALL, THEOREM):
        theorem(publish=publish)
    if name in (ALL, FRAGILITY):
        root = home / study.name
        with bars(len(standing(study.tasks, root).left), console=Console()) as watcher:
            failures = study.run(root, on=where, workers=workers, watcher=watcher)
        failed += _listed(failures)
        _show(study.evidence(root), publish)
    if name == STORMS:
        size = QUICK if quick else FULL if full else NORMAL
        failed += _storms(size, home, where=where, workers=workers)
    if failed:
        raise EquipoiseError(f"{failed} runs failed")


def _named(name: str) -> tuple[str, ...]:
    if name in (FRAGILITY, STORMS, PAPER, THEOREM):
        return ()
    return REPORTS if name == ALL else (name,)


def _run(
    experiment: Experiment, out: Path | None, *, where: Where, workers: int | None
) -> int:
    """Make the runs that are left; return how many failed."""
    console, root = Console(), _root(experiment, out)
    left = standing(experiment.tasks, root).left
    with bars(len(left), console=console) as watcher:
        failures = run_experiment(
            experiment, root, on=where, workers=workers, watcher=watcher
        )
    return _listed(failures)


def _storms(size: Size, home: Path, *, where: Where, workers: int | None) -> int:
    """Make the benchmark's runs and print their labels; return how many failed."""
    root, tasks = home / _storms_folder(size), plan(size)
    with bars(len(standing(tasks, root).left), console=Console()) as watcher:
        failures = run_jobs(
            tasks, root, make, on=where, workers=workers, watcher=watcher
        )
    Console().print(label_table(labels(root)))
    return _listed(failures)


def _storms_folder(size: Size) -> str:
    return "storms-quick" if size == QUICK else STORMS


def _listed(failures: list[Failure]) -> int:
    """Print each run that failed; return how many."""
    for failure in failures:
        Console().print(f"[red]{failure.task.name}: {failure.reason}")
    return len(failures)


def status(name: str | None, *, out: Path | None, json: Path | None) -> None:
    """Print how many runs of each experiment are done."""
    home, places = out or lab_directory(), list[tuple[str, Path, Sequence[Job]]]()
    for study in (Study(), Study(quick=True)) if name in (None, FRAGILITY) else ():
        places.append((study.name, home / study.name, study.tasks))
    for size in (NORMAL, QUICK) if name in (None, STORMS) else ():
        place = _storms_folder(size)
        places.append((place, home / place, plan(size)))
    names = () if name in (FRAGILITY, STORMS) else [name] if name else RECIPES
    for one in names:
        for experiment in (recipe(one), recipe(one, quick=True)):
            root = _root(experiment, out)
            places.append((experiment.name, root, experiment.tasks))
    rows = [(what, len(standing(t, at).done), len(t)) for what, at, t in places]
    result = {what: {"done": done, "runs": runs} for what, done, runs in rows}
    if json and put_json(as_json(result), json):
        return
    for what, done, runs in rows:
        Console().print(f"{what}: {done} of {runs} runs done")


def report(
    name: str,
    *,
    quick: bool,
    out: Path | None,
    publish: Path | None,
    data: Path | None,
) -> None:
    """Show tables and the finding of what is finished, and write the page."""
    if name in (ALL, SELECTION, PAPER) and (
        figures := saved_figures(out or lab_directory())
    ):
        _show(figures, publish)
    if name == STORMS:
        size = QUICK if quick else NORMAL
        found = labels((out or lab_directory()) / _storms_folder(size))
        Console().print(label_table(found))
    for one in _named(name):
        _report(recipe(one, quick=quick), out, publish)
    if name in (ALL, FRAGILITY):
        study = Study(quick=quick, cifar10=data)
        _show(study.evidence((out or lab_directory()) / study.name), publish)


def theorem(*, publish: Path | None) -> None:
    """Show brute force, exact θ and the paper's heuristic side by side."""
    _show(theorem_evidence(), publish)


def _root(experiment: Experiment, out: Path | None) -> Path:
    return (out or lab_directory()) / experiment.name


def _report(experiment: Experiment, out: Path | None, to: Path | None) -> None:
    root = _root(experiment, out)
    evidence = gather(experiment, root)
    _show(evidence, to)
    if to is not None:
        publishing.keep_pictures(experiment, root, to / evidence.name)
    verdict = finding(evidence).verdict
    page = write_page(experiment, root, rows(evidence), verdict=verdict)
    Console().print(f"page: {page}", soft_wrap=True)


def _show(evidence: Evidence, to: Path | None) -> None:
    """Print what the evidence says and, if asked, publish it as a page."""
    console, result = Console(), finding(evidence)
    for table in tables(evidence.question, result):
        console.print(table)
    console.print(result.verdict, highlight=False)
    if to is not None:
        place = publishing.publish(evidence, to / evidence.name)
        publishing.index(to)
        console.print(f"published: {place}", soft_wrap=True)
