"""Emadi's figures and tables at our scale, number beside number."""

from collections.abc import Sequence

from equipoise.lab.evidence import Evidence
from equipoise.lab.findings.finding import (
    Finding,
    Grid,
    measured,
    over_depth,
    over_training,
)
from equipoise.lab.published import beside
from equipoise.lab.results import Row, rows


def prepost(evidence: Evidence) -> Finding:
    """Figs 1, 2, 4, 5, 6, Table 1 and E.6."""
    found = rows(evidence)
    lines = beside(found)
    held = sum(line[3] == "holds" for line in lines)
    verdict = sentence(found)
    if lines:
        verdict += f" {held} of {len(lines)} published patterns hold at this scale."
    paper = Grid(
        title="The paper's numbers (774M parameters, 5000 steps) beside ours",
        head=["", "Emadi 2026", "ours, pre and post", "pattern"],
        cells=lines,
    )
    figures = [
        over_training(evidence, "loss", title="Training loss", y="nats per token"),
        over_depth(
            evidence, "gradient.norm", title="Fig. 1: gradient by layer", log=True
        ),
        over_training(
            evidence, "projection.G", title="Fig. 2: G through training", log=True
        ),
        over_depth(
            evidence, "attention.theta.p5", title="Fig. 4: θ by layer, 5th percentile"
        ),
        over_depth(evidence, "attention.theta.p50", title="Fig. 4: θ by layer, median"),
        over_training(
            evidence,
            "sensitivity.S_residual",
            title="Fig. 5: S and its range",
            log=True,
        ),
        over_depth(
            evidence, "sensitivity.S_residual", title="Fig. 6: S by layer", log=True
        ),
    ]
    return Finding(
        verdict=verdict,
        grids=[measured(evidence, found), paper],
        figures=[f for f in figures if f.lines],
    )


def sentence(rows: Sequence[Row]) -> str:
    """Say whether Emadi's pattern holds: post-LN starves its early layers."""
    by_arm = {row.arm: row for row in rows}
    if not {"pre", "post"} <= by_arm.keys():
        return "pre and post are not both finished yet."
    pre, post = by_arm["pre"], by_arm["post"]
    return " ".join([_starved(post), _carried(pre), _apart(pre, post)])


def _mean(row: Row, measure: str) -> float | None:
    found = row.values.get(measure)
    return found.mean if found else None


def _starved(post: Row) -> str:
    least = _mean(post, "gradient_least_to_last")
    if least is None:
        return "Gradients over depth were not recorded."
    said = f"post-LN's weakest layer gets {least:.1e} of the last layer's gradient"
    return f"{said}: its early layers do not learn." if least < 1e-3 else f"{said}."


def _carried(pre: Row) -> str:
    spread = _mean(pre, "gradient_spread")
    if spread is None:
        return ""
    return f"pre-LN's layers 2…N stay within a factor of {spread:.2g}."


def _apart(pre: Row, post: Row) -> str:
    a, b = _mean(pre, "validation"), _mean(post, "validation")
    if a is None or b is None:
        return ""
    better, worse = ("pre", "post") if a < b else ("post", "pre")
    return f"{better}-LN ends {abs(a - b):.2f} nats per token below {worse}-LN."
