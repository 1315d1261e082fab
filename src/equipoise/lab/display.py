"""Experiments on the terminal: bars while they run, a table when they are done."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from equipoise.lab import training
from equipoise.lab.experiment import Task
from equipoise.lab.findings import Finding
from equipoise.lab.local import Watcher


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
