"""What evidence comes to: a sentence, tables, figures. Pure: numbers in, text out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from equipoise.lab.evidence import Evidence
from equipoise.lab.figures import Figure, Line
from equipoise.lab.labels import NAMES
from equipoise.lab.results import Row, rows


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table: what it shows, its head, its cells."""

    title: str
    head: Sequence[str]
    cells: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What an experiment says."""

    verdict: str
    grids: Sequence[Grid]
    figures: Sequence[Figure] = field(default=())


Finder = Callable[[Evidence], Finding]


def plain(evidence: Evidence) -> Finding:
    """Return the experiment's table and its paired comparisons."""
    found = rows(evidence)
    pairs = [
        f"{row.arm} minus {baseline(evidence, row.arm)}: {row.against_first}"
        for row in found
        if row.against_first
    ]
    verdict = "; ".join(pairs) or "nothing to compare yet."
    figures = [over_training(evidence, name) for name in evidence.curves]
    return Finding(verdict=verdict, grids=[measured(evidence, found)], figures=figures)


def baseline(evidence: Evidence, arm: str) -> str:
    """Return the arm that this one is compared with."""
    return evidence.baselines.get(arm, next(iter(evidence.arms)))


def measured(evidence: Evidence, found: Sequence[Row]) -> Grid:
    """Return a line per measure and a column per arm; the last line compares pairs."""
    cells = [
        [NAMES.get(name, name), *(str(row.values.get(name, "–")) for row in found)]
        for name in evidence.measures
        if any(name in row.values for row in found)
    ]
    first = evidence.measures[0]
    versus = {baseline(evidence, row.arm) for row in found if row.against_first}
    said = f"minus {versus.pop()}" if len(versus) == 1 else "minus its baseline"
    pairs = [str(row.against_first or "–") for row in found]
    return Grid(
        title="Mean ± standard deviation over seeds; the last line is paired, "
        "with its 95 % interval",
        head=["", *(f"{row.arm} ({len(row.seeds)})" for row in found)],
        cells=[*cells, [f"{NAMES.get(first, first)}: {said}", *pairs]],
    )


def over_training(
    evidence: Evidence, name: str, *, title: str = "", y: str = "", log: bool = False
) -> Figure:
    """Return a quantity over steps, a line per arm; layers' range as a band."""
    lines = [
        Line(
            name=arm,
            x=one["x"],
            y=one["y"],
            low=one.get("low", ()),
            high=one.get("high", ()),
        )
        for arm, one in _drawn(evidence, name)
    ]
    return Figure(
        name=_file(name, "training"),
        title=title or name,
        x="step",
        y=y,
        lines=lines,
        log_y=log,
    )


def over_depth(
    evidence: Evidence, name: str, *, title: str, y: str = "", log: bool = False
) -> Figure:
    """Return a quantity over layers at the first sample and at the end, per arm."""
    lines = [
        Line(name=f"{arm}, {when}", x=list(range(1, len(one[key]) + 1)), y=one[key])
        for arm, one in _drawn(evidence, name)
        for key, when in (("end", "end"), ("start", "init"))
    ]
    return Figure(
        name=_file(name, "depth"), title=title, x="layer", y=y, lines=lines, log_y=log
    )


def _drawn(evidence: Evidence, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    return list(evidence.curves.get(name, {}).items())


def _file(name: str, kind: str) -> str:
    return f"{name.replace('.', '-').replace('/', '-')}-{kind}"
