"""Publish an experiment: a page for the repository, an offline page, the terminal.

Pages are made from raw numbers; the offline page shows the first seed's runs.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any

from rich import progress
from rich.console import Console
from rich.table import Table

from equipoise.report.html import rendered
from equipoise.report.offline_pages import write_page as write_page_file
from equipoise.report.report_model import view
from equipoise.store import Run, open_run
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.figures import svg
from equipoise_lab.results.finding import NAMES, Row, StudyFinding, StudyGrid
from equipoise_lab.running.experiment import Experiment
from equipoise_lab.running.workers import Job, Watcher
from equipoise_lab.studies.catalogue import finding
from equipoise_lab.training.options import TrainingProgress

RAW, PAGE = "raw.json", "README.md"
FEW = 5
"""Seeds below which a page says what they can show."""
ACTIONS = "actions.json"
"""Written by hand: experiment → what a reader should do, and the finding it follows."""


def publish(evidence: Evidence, folder: Path) -> Path:
    """Write raw numbers, page and figures; return the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RAW).write_text(evidence.to_json(), encoding="utf-8")
    # Read back: what is shown must follow from what is kept.
    stored = Evidence.from_json((folder / RAW).read_text(encoding="utf-8"))
    files = page_files(stored)
    for old in folder.glob("*.svg"):
        if old.name not in files:
            old.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / PAGE


def page_files(evidence: Evidence) -> dict[str, str]:
    """Return file name → content: the page, and a file per figure."""
    found = finding(evidence)
    files = {f"{figure.name}.svg": svg(figure) for figure in found.figures}
    return {PAGE: markdown(evidence, found), **files}


def markdown(evidence: Evidence, found: StudyFinding) -> str:
    """Return the page as text."""
    parts = [f"# {evidence.question}", f"**Finding.** {found.verdict}"]
    parts += [f"## {grid.title}\n\n{_table(grid)}" for grid in found.grids]
    if found.figures:
        shown = [f"![{f.title}]({f.name}.svg)" for f in found.figures]
        parts.append("## Figures\n\n" + "\n\n".join(shown))
    parts.append(_made(evidence))
    return "\n\n".join(parts) + "\n"


def _table(grid: StudyGrid) -> str:
    lines = [_row(grid.head), _row(["---"] * len(grid.head))]
    return "\n".join([*lines, *(_row(cells) for cells in grid.cells)])


def _row(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _made(evidence: Evidence) -> str:
    about = evidence.about
    runs = sum(len(by_seed) for by_seed in evidence.runs.values())
    options = ", ".join(f"{k} {v}" for k, v in about.get("options", {}).items())
    seeds = ", ".join(map(str, evidence.seeds))
    facts = {
        "Command": f"`{about.get('command')}`",
        "Runs": runs
        and f"{runs}: {len(evidence.runs)} arms, seeds {seeds}; arms share seeds "
        "and data",
        "Few seeds": runs and len(evidence.seeds) < FEW and _few(evidence),
        "Shared options": options,
        "Machine": about.get("machine"),
        "Cost": f"{about['cpu_minutes']} CPU minutes",
        "Versions": f"Python {about.get('python')}, torch {about.get('torch')}, "
        f"equipoise {about.get('equipoise')}",
        "Raw numbers": f"[{RAW}]({RAW}), from which this page is made",
    }
    listed = "\n".join(f"- {name}: {fact}" for name, fact in facts.items() if fact)
    return f"## How it was made\n\n{listed}"


def _few(evidence: Evidence) -> str:
    """Say what an interval over so few seeds can show."""
    from scipy import stats

    reach = [
        float(stats.t.ppf(0.975, n - 1)) / n**0.5 for n in (len(evidence.seeds), FEW)
    ]
    return (
        f"{len(evidence.seeds)}, so read the page as exploratory: 0 lies outside an "
        f"interval only where a difference exceeds {reach[0]:.1f} of its standard "
        f"deviations between seeds ({reach[1]:.1f} with {FEW} seeds)"
    )


def keep_pictures(experiment: Experiment, root: Path, folder: Path) -> None:
    """Copy what measurements drew in runs of the first seed: ``PICTURE-ARM.png``."""
    for task in experiment.tasks:
        if task.seed == experiment.seeds[0]:
            for drawn in (root / task.folder).glob("*.png"):
                copyfile(drawn, folder / f"{drawn.stem}-{task.arm.name}.png")


def index(folder: Path) -> Path:
    """Write the list of all published experiments and return where it is."""
    place = folder / PAGE
    page = listing(published(folder), actions(folder))
    place.write_text(page, encoding="utf-8")
    return place


def actions(folder: Path) -> dict[str, str]:
    """Return experiment → what to do, in one sentence."""
    file = folder / ACTIONS
    given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {name: action["do"] for name, action in given.items()}


def published(folder: Path) -> dict[str, Evidence]:
    """Return what was published under a folder, by name."""
    return {
        raw.parent.name: Evidence.from_json(raw.read_text(encoding="utf-8"))
        for raw in sorted(folder.glob(f"*/{RAW}"))
    }


def listing(found: Mapping[str, Evidence], actions: Mapping[str, str]) -> str:
    """Return the index: what to do, then question and finding of each experiment."""
    total = sum(e.about["cpu_minutes"] for e in found.values())
    listed = [
        f"- [{found[name].question}]({name}/{PAGE}) {action}"
        for name, action in actions.items()
        if name in found
    ]
    parts = ["# Results", "\n".join(listed)] if listed else ["# Results"]
    parts += [
        "## Findings in numbers",
        "These are small models on CPUs; read each line above as what to try first, "
        "and its page for seeds, intervals and raw numbers. `equipoise lab run all "
        f"--publish docs/results` makes all of this again ({total:.0f} CPU minutes "
        "here; finished runs are not repeated). Pages are made from the raw numbers "
        "beside them, and a test holds them to it.",
    ]
    parts += [
        f"### [{e.question}]({name}/{PAGE})\n\n{finding(e).verdict}"
        for name, e in found.items()
    ]
    return "\n\n".join(parts) + "\n"


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
    page = rendered(replace(report, table=lines(experiment, shown)), runs)
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
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        progress.TextColumn("{task.fields[state]}"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console) as shown:
        overall = shown.add_task("runs", total=total, state="")
        lines: dict[str, progress.TaskID] = {}

        def watcher(job: Job, news: TrainingProgress | None) -> None:
            if news is None:
                shown.advance(overall)
                if job.name in lines:
                    shown.remove_task(lines.pop(job.name))
                return
            if job.name not in lines:
                lines[job.name] = shown.add_task(job.name, total=news.steps, state="")
            shown.update(lines[job.name], completed=news.step, state=_state(news))

        yield watcher


def _state(news: TrainingProgress) -> str:
    line = f"loss {news.loss:.3f}  ‖g‖ {news.gradient_norm:.2g}"
    return f"{line}  [bold red]{news.warning}" if news.warning else line


def tables(question: str, found: StudyFinding) -> list[Table]:
    """Return every table of a finding; the first carries the question."""
    shown = []
    for place, grid in enumerate(found.grids):
        one = Table(*grid.head, title=None if place else question, caption=grid.title)
        for cells in grid.cells:
            one.add_row(*cells)
        shown.append(one)
    return shown
