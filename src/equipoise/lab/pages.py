"""An experiment on one offline page: table, finding, and the first seed's runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from equipoise.lab.experiment import Experiment
from equipoise.lab.labels import NAMES
from equipoise.lab.results import Row
from equipoise.report import place
from equipoise.report.html import rendered
from equipoise.report.views import view
from equipoise.store import Run, open_run


def first_runs(experiment: Experiment, root: Path) -> dict[str, Run]:
    """Return per arm the recorded run of its first finished seed."""
    found: dict[str, Run] = {}
    for task in experiment.tasks:
        path = root / task.folder / "run.eqp"
        if task.arm.name not in found and path.is_file():
            found[task.arm.name] = open_run(path)
    return found


def write_page(
    experiment: Experiment, root: Path, rows: Sequence[Row], *, verdict: str
) -> Path:
    """Write ``report.html`` beside the runs and return where it is."""
    runs = first_runs(experiment, root)
    report = view(runs, title=experiment.question, verdict=verdict)
    shown = [row for row in rows if row.arm in runs]
    page = rendered(replace(report, table=lines(experiment, shown)))
    return place.write_page(root / "report.html", page)


def lines(experiment: Experiment, rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Return the page's table: what is measured, and a cell per arm."""
    found = [
        (NAMES.get(name, name), [str(row.values.get(name, "–")) for row in rows])
        for name in experiment.measures
    ]
    first = experiment.measures[0]
    pairs = [str(row.against_first or "–") for row in rows]
    return [*found, (f"{NAMES.get(first, first)}: minus the baseline", pairs)]
