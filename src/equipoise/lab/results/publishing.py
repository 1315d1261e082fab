"""An experiment's page for the repository: text and figures made from raw numbers."""

from collections.abc import Mapping
from pathlib import Path
from shutil import copyfile
from typing import Any

from equipoise.lab.results.evidence import Evidence
from equipoise.lab.results.figures import svg
from equipoise.lab.running.experiment import Experiment
from equipoise.lab.studies.findings import Finding, Grid, finding

RAW, PAGE = "raw.json", "README.md"


def publish(evidence: Evidence, folder: Path) -> Path:
    """Write raw numbers, page and figures; return the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RAW).write_text(evidence.to_json(), encoding="utf-8")
    # Read back: what is shown must follow from what is kept.
    kept = Evidence.from_json((folder / RAW).read_text(encoding="utf-8"))
    files = rendered(kept)
    for old in folder.glob("*.svg"):
        if old.name not in files:
            old.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / PAGE


def rendered(evidence: Evidence) -> dict[str, str]:
    """Return file name → content: the page, and a file per figure."""
    found = finding(evidence)
    files = {f"{figure.name}.svg": svg(figure) for figure in found.figures}
    return {PAGE: markdown(evidence, found), **files}


def markdown(evidence: Evidence, found: Finding) -> str:
    """Return the page as text."""
    parts = [f"# {evidence.question}", f"**Finding.** {found.verdict}"]
    parts += [f"## {grid.title}\n\n{_table(grid)}" for grid in found.grids]
    if found.figures:
        shown = [f"![{f.title}]({f.name}.svg)" for f in found.figures]
        parts.append("## Figures\n\n" + "\n\n".join(shown))
    parts.append(_made(evidence))
    return "\n\n".join(parts) + "\n"


def _table(grid: Grid) -> str:
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
        "Shared options": options,
        "Machine": about.get("machine"),
        "Cost": f"{about['cpu_minutes']} CPU minutes",
        "Versions": f"Python {about.get('python')}, torch {about.get('torch')}, "
        f"equipoise {about.get('equipoise')}",
        "Raw numbers": f"[{RAW}]({RAW}), from which this page is made",
    }
    listed = "\n".join(f"- {name}: {fact}" for name, fact in facts.items() if fact)
    return f"## How it was made\n\n{listed}"


def keep_pictures(experiment: Experiment, root: Path, folder: Path) -> None:
    """Copy what judges drew in runs of the first seed: ``PICTURE-ARM.png``."""
    for task in experiment.tasks:
        if task.seed == experiment.seeds[0]:
            for drawn in (root / task.folder).glob("*.png"):
                copyfile(drawn, folder / f"{drawn.stem}-{task.arm.name}.png")


def index(folder: Path) -> Path:
    """Write the list of all published experiments and return where it is."""
    place = folder / PAGE
    place.write_text(listing(published(folder)), encoding="utf-8")
    return place


def published(folder: Path) -> dict[str, Evidence]:
    """Return what was published under a folder, by name."""
    return {
        raw.parent.name: Evidence.from_json(raw.read_text(encoding="utf-8"))
        for raw in sorted(folder.glob(f"*/{RAW}"))
    }


def listing(found: Mapping[str, Evidence]) -> str:
    """Return the index: question and finding of each experiment."""
    total = sum(e.about["cpu_minutes"] for e in found.values())
    parts = [
        "# Results",
        "Experiments of the lab, each with its seeds, intervals and raw numbers. "
        "`equipoise lab run all --publish docs/results` makes all of this again "
        f"({total:.0f} CPU minutes here; finished runs are not repeated). Pages are "
        "made from the raw numbers beside them, and a test holds them to it.",
    ]
    parts += [
        f"## [{e.question}]({name}/{PAGE})\n\n{finding(e).verdict}"
        for name, e in found.items()
    ]
    return "\n\n".join(parts) + "\n"
