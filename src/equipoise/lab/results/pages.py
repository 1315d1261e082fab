"""An experiment on one offline page: table, finding, and the first seed's runs.

Experiments on the terminal: bars while they run, a table when they are done.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from equipoise.lab.results.arms import Row
from equipoise.lab.results.finding import NAMES
from equipoise.lab.running.experiment import Experiment, Task
from equipoise.lab.running.local import Watcher
from equipoise.lab.studies.findings import Finding
from equipoise.lab.training import options as training
from equipoise.report.html import rendered
from equipoise.report.pages import write_page as write_page_file
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
    return write_page_file(root / "report.html", page)


def lines(experiment: Experiment, rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Return the page's table: what is measured, and a cell per arm."""
    found = [
        (NAMES.get(name, name), [str(row.values.get(name, "–")) for row in rows])
        for name in experiment.measures
    ]
    first = experiment.measures[0]
    pairs = [str(row.against_first or "–") for row in rows]
    return [*found, (f"{NAMES.get(first, first)}: minus the baseline", pairs)]


@contextmanager
def bars(total: int, *, console: Console) -> Iterator[Watcher]:
    """Show one bar for the sweep and one per run under way."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        overall = progress.add_task("runs", total=total, said="")
        lines: dict[str, TaskID] = {}

        def watcher(task: Task, news: training.Progress | None) -> None:
            name = f"{task.arm.name} {task.seed}"
            if news is None:
                progress.advance(overall)
                if name in lines:
                    progress.remove_task(lines.pop(name))
                return
            if name not in lines:
                lines[name] = progress.add_task(name, total=news.steps, said="")
            progress.update(lines[name], completed=news.step, said=_said(news))

        yield watcher


def _said(news: training.Progress) -> str:
    line = f"loss {news.loss:.3f}  ‖g‖ {news.gradient_norm:.2g}"
    return f"{line}  [bold red]{news.warning}" if news.warning else line


def tables(question: str, found: Finding) -> list[Table]:
    """Return every table of a finding; the first carries the question."""
    shown = []
    for place, grid in enumerate(found.grids):
        one = Table(*grid.head, title=None if place else question, caption=grid.title)
        for cells in grid.cells:
            one.add_row(*cells)
        shown.append(one)
    return shown
