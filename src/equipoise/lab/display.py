"""Experiments on the terminal: bars while they run, a table when they are done."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from equipoise.lab import training
from equipoise.lab.experiment import Experiment, Task
from equipoise.lab.labels import NAMES
from equipoise.lab.local import Watcher
from equipoise.lab.results import Row


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


def table(experiment: Experiment, rows: Sequence[Row]) -> Table:
    """Return a line per measure and a column per arm; the last line compares pairs."""
    shown = Table(
        "",
        *(f"{row.arm} ({len(row.seeds)})" for row in rows),
        title=experiment.question,
        caption="mean ± sd over (seeds); paired difference with 95 % interval",
    )
    for name, cells in lines(experiment, rows):
        shown.add_row(name, *cells)
    return shown


def lines(experiment: Experiment, rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Return the table's lines as text: what is measured, and a cell per arm."""
    found = [
        (NAMES.get(name, name), [str(row.values.get(name, "–")) for row in rows])
        for name in experiment.measures
    ]
    first = experiment.measures[0]
    pairs = [str(row.against_first or "–") for row in rows]
    name = f"{NAMES.get(first, first)}: minus {experiment.arms[0].name}"
    return [*found, (name, pairs)]
