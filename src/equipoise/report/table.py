"""The numbers of a run that fit in one row."""

import math

from equipoise.report.panel import Runs
from equipoise.report.per_layer import first_to_last
from equipoise.store import Run

ABSENT = "not recorded"
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
        "findings": _findings,
    }
    return [
        (name, [cell(run) for run in runs.values()]) for name, cell in measures.items()
    ]


def short(value: float | None) -> str:
    """Return a number for people: four digits, and NaN said as it is.

    >>> short(0.000123456), short(3.0), short(math.nan), short(None)
    ('1.235e-04', '3', 'NaN', 'not recorded')
    """
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'−' if value < 0 else ''}Inf"
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3e}"
    return f"{value:.4g}"


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


def _findings(run: Run) -> str:
    counts = {kind: 0 for kind in ("error", "warn", "info")}
    for finding in run.findings:
        counts[finding.severity] += 1
    said = [f"{count} {kind}" for kind, count in counts.items() if count]
    return ", ".join(said) or "none"
