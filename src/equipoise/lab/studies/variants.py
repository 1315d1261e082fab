"""One part exchanged for another, within each residual form."""

from equipoise.lab.results.arms import Row, rows
from equipoise.lab.results.evidence import Evidence
from equipoise.lab.results.finding import (
    Finding,
    baseline,
    measured,
    over_depth,
    over_training,
)

VANISHED = 1e-3
SMALL = 0.01
"""Nats: a difference below this matters to nobody, however steady it is."""


def variants(evidence: Evidence) -> Finding:
    """Compare each arm with its baseline: loss by interval, gradients by pattern."""
    found = rows(evidence)
    by_arm = {row.arm: row for row in found}
    said = [
        _said(row, by_arm[baseline(evidence, row.arm)])
        for row in found
        if row.against_first is not None and baseline(evidence, row.arm) in by_arm
    ]
    figures = [
        over_training(evidence, "loss", title="Training loss", y="nats per token"),
        over_depth(evidence, "gradient.norm", title="Gradient by layer", log=True),
    ]
    return Finding(
        verdict=" ".join(said) or "nothing to compare yet.",
        grids=[measured(evidence, found)],
        figures=[figure for figure in figures if figure.lines],
    )


def _said(row: Row, other: Row) -> str:
    pair = row.against_first
    assert pair is not None
    if abs(pair.mean) < SMALL:
        loss = "ends within a hundredth of a nat"
    elif pair.low > 0:
        loss = "ends higher"
    elif pair.high < 0:
        loss = "ends lower"
    else:
        loss = "ends no differently"
    return (
        f"{row.arm} against {other.arm}: {loss} ({pair.mean:+.3f} nats "
        f"[{pair.low:+.3f}, {pair.high:+.3f}]); its gradients {_pattern(row)}, "
        f"{other.arm}'s {_pattern(other)}."
    )


def _pattern(row: Row) -> str:
    least = row.values.get("gradient_least_to_last")
    if least is None:
        return "were not recorded"
    word = "vanish" if least.mean < VANISHED else "do not vanish"
    return f"{word} (weakest ÷ last {least.mean:.2g})"
