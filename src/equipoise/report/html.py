"""The HTML report of runs: the board's page with its data inside, in one offline file.

The data take at most 5 MB. Where a run holds more, columns of steps are merged, lowest
and highest value kept, and the page says so.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from equipoise.records import Reading
from equipoise.report.assets import asset, script, style
from equipoise.report.changes import changes
from equipoise.report.comparison import comparison_json, details_of
from equipoise.report.grids import Grid, blocks_of, grid, grid_json, heads_json
from equipoise.report.offline_pages import write_page
from equipoise.report.page_model import Json, changes_json, run_json, verdict_json
from equipoise.report.quantities import shown
from equipoise.report.report_model import Report, Runs, view
from equipoise.store import Run

POINTS = 600
"""Most columns of a quantity."""
GRID_BYTES, HEAD_BYTES = 3_400_000, 1_100_000
"""Shares of the 5 MB: values over steps, and values of single heads."""
FEWEST = 40
HEAD_STEPS = 60
"""Most steps at which single heads are kept."""
SHORT = 4096
"""Steps of a run whose series are read whole."""
COMPARED = 6
"""Most runs of which each may be the baseline on the page."""


@dataclass(slots=True)
class _Contents:
    """What the page carries, as it is gathered."""

    runs: int
    grids: dict[str, dict[str, Grid]] = field(default_factory=dict)
    heads: dict[str, dict[str, Json]] = field(default_factory=dict)
    merged: bool = False
    skipped_heads: bool = False

    @property
    def note(self) -> str:
        """What is not all of it, in a sentence."""
        parts = []
        if self.merged:
            parts.append(
                "Steps are merged into columns that keep the lowest, mean and highest "
                "value"
            )
        if self.skipped_heads:
            parts.append("single heads are kept at some of the steps")
        if not parts:
            return ""
        sentence = "; ".join(parts)
        return f"{sentence[0].upper()}{sentence[1:]}. The run files hold every reading."


def write_report(
    runs: Runs,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    verdict: str | None = None,
) -> Path:
    """Write the report of some runs, side by side, and return where it is."""
    page = rendered(view(runs, title=title, verdict=verdict), runs)
    return write_page(Path(path), page)


def rendered(report: Report, runs: Runs) -> str:
    """Return the page."""
    data = report_json(report, runs)
    verdicts = [
        (run["label"], run["verdict"]["state"], run["verdict"]["sentence"])
        for run in data["runs"]
    ]
    return _template().render(
        title=report.title,
        verdicts=verdicts,
        css=Markup(style()),
        js=Markup(script()),
        data=Markup(embedded(data)),
    )


@cache
def _template() -> Template:
    made = Environment(autoescape=True, undefined=StrictUndefined)
    return made.from_string(asset("page.html.j2"))


def report_json(report: Report, runs: Runs) -> Json:
    """Return all that the page shows."""
    contents = _gathered(runs)
    described = [_run(run, label, contents.grids[label]) for label, run in runs.items()]
    grids, columns = _columns_apart(contents.grids)
    return {
        "title": report.title,
        "verdict": report.verdict if report.given else "",
        "note": contents.note,
        "runs": described,
        "numbers": [[name, cells] for name, cells in report.table],
        "comparisons": _comparisons(runs, contents.grids),
        "grids": grids,
        "columns": columns,
        "heads": contents.heads,
    }


def _run(run: Run, label: str, grids: Mapping[str, Grid]) -> Json:
    given = run.verdict
    verdict = verdict_json(run, given)
    turned = changes(list(grids.values()), given.quantities, given.findings)
    found = changes_json(turned, blocks_of(run))
    # Last: reading the numbers is what finds a damaged file, and findings name it.
    return {
        **run_json(run, label=label, key=label),
        "verdict": verdict,
        "changes": found,
    }


def _gathered(runs: Runs) -> _Contents:
    contents = _Contents(runs=max(1, len(runs)))
    for label, run in runs.items():
        names = sorted(run.quantities, key=lambda name: (shown(name).rank, name))
        last = {name: run.ends(name)[1] for name in names}
        points = _points(last, GRID_BYTES // contents.runs)
        own = {name: grid(run, name, points=points, between=None) for name in names}
        contents.grids[label] = own
        contents.merged |= any(one.sampled for one in own.values())
        _add_heads(contents, label, run, last=last)
    return contents


def _points(last: Mapping[str, Reading], room: int) -> int:
    """Return how many columns fit: three planes of 4 bytes a value, as base64."""
    sites = sum(len(reading.sites) for reading in last.values())
    return int(np.clip(room // max(1, 16 * sites), FEWEST, POINTS))


def _add_heads(
    contents: _Contents, label: str, run: Run, *, last: Mapping[str, Reading]
) -> None:
    """Keep head × layer values at as many steps as there is room for."""
    room = HEAD_BYTES // contents.runs
    widths = {name: _values(reading) for name, reading in last.items()}
    names = [name for name, width in widths.items() if width]
    total = sum(widths[name] for name in names)
    if not total:
        return
    count = int(np.clip(room // (6 * total), 1, HEAD_STEPS))
    for name in names:
        steps = contents.grids[label][name].last
        picks = np.unique(np.linspace(0, len(steps) - 1, count).astype(np.int64))
        contents.skipped_heads |= len(picks) < len(steps)
        readings = _readings(run, name, [int(steps[n]) for n in picks])
        own = contents.heads.setdefault(label, {})
        own[name] = heads_json(readings, blocks_of(run))


def _readings(run: Run, name: str, steps: Sequence[int]) -> list[Reading]:
    """Return the readings of some steps: a short series is read once, in one go."""
    if run.steps.size > SHORT:
        return [run.near(name, step) for step in steps]
    series = {s: (at, np.atleast_2d(x.T).T) for s, (at, x) in run.series(name).items()}
    found = []
    for step in steps:
        rows = {s: x[at == step] for s, (at, x) in series.items()}
        own = {s: tuple(x[-1].tolist()) for s, x in rows.items() if len(x)}
        sites, values = tuple(own), tuple(own.values())
        found.append(Reading(step=step, quantity=name, sites=sites, values=values))
    return found


def _values(reading: Reading) -> int:
    """Return how many values a reading of heads has; 0 where a site has only one."""
    widths = [len(row) for row in reading.values]
    return sum(widths) if max(widths, default=0) > 1 else 0


def _columns_apart(
    grids: Mapping[str, Mapping[str, Grid]],
) -> tuple[dict[str, dict[str, Json]], list[Json]]:
    """Return the grids with their steps by number: many quantities share them."""
    numbers: dict[tuple[bytes, bytes], int] = {}
    columns: list[Json] = []
    found: dict[str, dict[str, Json]] = {}
    for label, own in grids.items():
        found[label] = {}
        for name, one in own.items():
            record = grid_json(one)
            steps: Json = {k: record.pop(k) for k in ("first", "last") if k in record}
            key = (one.first.tobytes(), one.last.tobytes())
            if key not in numbers:
                numbers[key] = len(columns)
                columns.append(steps)
            found[label][name] = record | {"columns": numbers[key]}
    return found, columns


def _comparisons(
    runs: Runs, grids: Mapping[str, Mapping[str, Grid]]
) -> dict[str, Json]:
    if len(runs) < 2:
        return {}
    details = {label: details_of(run) for label, run in runs.items()}
    cards = {label: run.card for label, run in runs.items()}
    return {
        label: comparison_json(
            grids, details, baseline=label, blocks=blocks_of(run), cards=cards
        )
        for label, run in list(runs.items())[:COMPARED]
    }


def embedded(data: Any) -> str:
    """Return data as JSON that cannot end its script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028")
