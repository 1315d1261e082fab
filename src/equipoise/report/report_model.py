"""The view-model of a report: verdicts, table and findings as pure data.

Every renderer shows it, in the order it stands here.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from equipoise.judging.card import Card
from equipoise.judging.verdict import STATES, State, Verdict
from equipoise.records import SEVERITIES, Finding, Reading, RunInfo
from equipoise.store import Run
from equipoise.text.numbers import ABSENT, short

Runs = Mapping[str, Run]
"""What each run is called in the report → the run."""

Rows = list[tuple[str, list[str]]]
"""What is measured, and its cell for each run."""


def table(runs: Runs) -> Rows:
    """Return one row per measure and one cell per run."""
    measures = {
        "steps": _steps,
        "loss, first → last": _loss,
        "gradient, first layer ÷ last": _ratio,
        "θ, p5 · median · largest": _theta,
        "largest S over layers": _sensitivity,
        "findings": _finding_counts,
    }
    return [
        (name, [cell(run) for run in runs.values()]) for name, cell in measures.items()
    ]


def _steps(run: Run) -> str:
    steps = run.steps
    return f"{steps[0]}–{steps[-1]}" if len(steps) else "none yet"


def _loss(run: Run) -> str:
    if "loss" not in run.quantities:
        return ABSENT
    first, last = run.ends("loss")
    return f"{short(first.values[0][0])} → {short(last.values[0][0])}"


def _ratio(run: Run) -> str:
    return short(first_to_last(run))


GRADIENT = "gradient.norm"


def first_to_last(run: Run) -> float | None:
    """Return the first layer's gradient norm over the last's, at the last sample."""
    if GRADIENT not in run.quantities:
        return None
    last = run.ends(GRADIENT)[1]
    values = {s: v[0] for s, v in zip(last.sites, last.values, strict=True)}
    sites = block_sites(run, last)
    if len(sites) < 2 or not values[sites[-1]]:
        return None
    return values[sites[0]] / values[sites[-1]]


def block_sites(run: Run, reading: Reading) -> list[str]:
    """Return the sites that are layers, in the order of the model.

    The run says which they are; where it does not, they are the sites with a number in
    their name, in the order of their numbers.
    """
    declared = run.info.details.get("blocks")
    if declared:
        return [site for site in declared if site in reading.sites]
    numbered = (site for site in reading.sites if re.search(r"\d", site))
    return sorted(numbered, key=lambda s: [int(n) for n in re.findall(r"\d+", s)])


def _theta(run: Run) -> str:
    cells = (_last_mean(run, f"attention.theta.{q}") for q in ("p5", "p50", "p100"))
    values = list(cells)
    if values == [None] * 3:
        return ABSENT
    return " · ".join(short(value) for value in values)


def _last_mean(run: Run, quantity: str) -> float | None:
    """Return the mean over layers and heads at the last sample."""
    if quantity not in run.quantities:
        return None
    values = [v for row in run.ends(quantity)[1].values for v in row]
    return sum(values) / len(values) if values else None


def _sensitivity(run: Run) -> str:
    if "sensitivity.S" not in run.quantities:
        return ABSENT
    values = [v for row in run.ends("sensitivity.S")[1].values for v in row]
    broken = [v for v in values if not math.isfinite(v)]
    return short(broken[0] if broken else max(values, default=None))


def _finding_counts(run: Run) -> str:
    counts = dict.fromkeys(SEVERITIES, 0)
    for finding in run.findings:
        counts[finding.severity] += 1
    parts = [f"{count} {kind}" for kind, count in counts.items() if count]
    return ", ".join(parts) or "none"


SHOWN = 60
"""Findings listed per run: a page is for reading, the run file keeps them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinding:
    """A finding, and the run it belongs to."""

    run: str
    finding: Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """What a run is, for the end of the page."""

    label: str
    file: str
    info: RunInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One page, or one screen."""

    title: str
    verdict: str
    given: bool
    """Whether the caller wrote the verdict; it then stands above those of the runs."""
    state: State
    """The worst state among the verdicts."""
    verdicts: dict[str, Verdict]
    """What is the matter with each run."""
    cards: dict[str, Card]
    """What each run's loop was seen to do."""
    table: Rows
    findings: list[RunFinding]
    """The gravest first, then by step."""
    unlisted: int
    """How many more findings the run files hold."""
    runs: list[RunDetails]


def view(
    runs: Runs,
    *,
    title: str | None = None,
    verdict: str | None = None,
) -> Report:
    """Return the report of some runs side by side.

    Args:
        runs: What each is called → the run.
        title: By default the names.
        verdict: By default the verdict on each.
    """
    # Before the findings: reading the numbers is what finds a damaged file.
    numbers = table(runs)
    verdicts = {label: run.verdict for label, run in runs.items()}
    found = _findings(runs)
    shown = [f for label in runs for f in _of(label, found)[:SHOWN]]
    return Report(
        title=title or " and ".join(runs),
        verdict=verdict or default_verdict(verdicts),
        given=verdict is not None,
        state=worst(verdicts.values()),
        verdicts=verdicts,
        cards={label: run.card for label, run in runs.items()},
        table=numbers,
        findings=sorted(shown, key=_gravity),
        unlisted=len(found) - len(shown),
        runs=[
            RunDetails(label=label, file=run.path.name, info=run.info)
            for label, run in runs.items()
        ],
    )


def worst(verdicts: Iterable[Verdict]) -> State:
    """Return the worst state among them."""
    return max((v.state for v in verdicts), key=STATES.index, default="not judged")


def labelled(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs under their names; where names repeat, under what differs.

    That is the first part of their paths that they do not share, where it is short and
    tells them apart; otherwise they are numbered.
    """
    names = [run.info.name for run in runs]
    if len(set(names)) < len(names):
        names = parts_apart([run.path.absolute() for run in runs]) or names
    found: dict[str, Run] = {}
    for name, run in zip(names, runs, strict=True):
        label, n = name, 2
        while label in found:
            label, n = f"{name} ({n})", n + 1
        found[label] = run
    return found


LONGEST_PART = 24
"""Characters of a part of a path that may stand for a run."""


def parts_apart(paths: Sequence[Path]) -> list[str]:
    """Return the first part in which all paths differ; nothing if it is long.

    >>> parts_apart([Path("/runs/pre/1/run.eqp"), Path("/runs/post/1/run.eqp")])
    ['pre', 'post']
    >>> parts_apart([Path("/runs/lr3.eqp"), Path("/runs/lr4.eqp")])
    ['lr3', 'lr4']
    """
    parts = [path.with_suffix("").parts for path in paths]
    for column in zip(*parts, strict=False):
        apart = len(set(column)) == len(paths)
        if apart and max(map(len, column)) <= LONGEST_PART:
            return list(column)
    return []


def default_verdict(verdicts: Mapping[str, Verdict]) -> str:
    """Return the verdict on each run in a line, and what to do where it is bad."""
    return "\n".join(_sentence(*pair) for pair in verdicts.items())


def _sentence(label: str, verdict: Verdict) -> str:
    advice = f" Try: {verdict.advice}." if verdict.advice else ""
    return f"{label}: {verdict.state}: {verdict.headline}.{advice}"


def _findings(runs: Runs) -> list[RunFinding]:
    found = (
        RunFinding(run=label, finding=f)
        for label, r in runs.items()
        for f in r.findings
    )
    return sorted(found, key=_gravity)


def _gravity(found: RunFinding) -> tuple[int, int]:
    return found.finding.order


def _of(label: str, found: Iterable[RunFinding]) -> list[RunFinding]:
    return [f for f in found if f.run == label]
