"""Experiments on the terminal: bars while they run, a table when they are done."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from equipoise.lab import training
from equipoise.lab.experiment import Experiment, Task
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
    """Return mean ± sd per arm, and the paired difference of the first measure."""
    first = experiment.measures[0]
    pair = f"{first} against {experiment.arms[0].name}"
    shown = Table(
        "arm",
        "seeds",
        *experiment.measures,
        pair,
        title=experiment.question,
        caption="mean ± sd over seeds; paired difference with 95 % interval",
    )
    for row in rows:
        cells = [str(row.values.get(name, "–")) for name in experiment.measures]
        against = str(row.against_first) if row.against_first else "–"
        shown.add_row(row.arm, str(len(row.seeds)), *cells, against)
    return shown
