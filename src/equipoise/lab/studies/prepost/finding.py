"""Emadi's figures and tables at our scale, number beside number.

The paper's numbers beside ours, and whether the pattern holds at our scale.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from equipoise.lab.results.arms import Row, rows
from equipoise.lab.results.evidence import Evidence
from equipoise.lab.results.finding import (
    Finding,
    Grid,
    measured,
    over_depth,
    over_training,
)

Means = dict[str, dict[str, float]]
"""arm → measure → mean over seeds."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """One published statement about pre-LN and post-LN."""

    where: str
    says: str
    measure: str
    holds: Callable[[float, float], bool]
    """Of the means of pre and post."""


EMADI = (
    Pattern(
        where="Table 1",
        says="loss 51.45 < 61.15 (inferred: 3.216 < 3.822 nats)",
        measure="validation",
        holds=lambda pre, post: pre < post,
    ),
    Pattern(
        where="Table 1",
        says="spikes 0 and 0.3 ± 0.5",
        measure="spikes",
        holds=lambda pre, post: pre <= post,
    ),
    Pattern(
        where="Fig. 1",
        says="post-LN vanishes in layers 1–30, pre-LN does not",
        measure="gradient_least_to_last",
        holds=lambda pre, post: post < 1e-3 and pre > 1e-1,
    ),
    Pattern(
        where="Fig. 2",
        says="G grows in training",
        measure="growth_G",
        holds=lambda pre, post: pre > 0 and post > 0,
    ),
    Pattern(
        where="Fig. 4",
        says="θ/τ = 1.000 throughout (here: 5th percentile of rows)",
        measure="theta_p5",
        holds=lambda pre, post: min(pre, post) > 0.9995,
    ),
    Pattern(
        where="Fig. 5",
        says="S, residual stream: ~1e5 for pre, ~1e3 for post",
        measure="S_residual",
        holds=lambda pre, post: pre > 10 * post,
    ),
    Pattern(
        where="Fig. 5",
        says="CV of S over layers .97 and .40",
        measure="S_residual_cv",
        holds=lambda pre, post: pre > post,
    ),
    Pattern(
        where="Fig. 6",
        says="S grows with depth in pre-LN, flat in post-LN",
        measure="S_residual_slope",
        holds=lambda pre, post: pre > 1 and abs(post) < pre,
    ),
    Pattern(
        where="E.6",
        says="Δ ln G 1.29 and 1.13",
        measure="growth_G",
        holds=lambda pre, post: pre > post > 0,
    ),
    Pattern(
        where="E.6",
        says="Δ ln B̄² 2.91 and about 0",
        measure="growth_B2",
        holds=lambda pre, post: pre > 10 * abs(post),
    ),
)


def beside(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """Return (where, the paper, ours, verdict) for what was measured."""
    means: Means = {
        row.arm: {name: found.mean for name, found in row.values.items()}
        for row in rows
    }
    pre, post = means.get("pre", {}), means.get("post", {})
    return [
        _line(pattern, pre[pattern.measure], post[pattern.measure])
        for pattern in EMADI
        if pattern.measure in pre and pattern.measure in post
    ]


def _line(pattern: Pattern, pre: float, post: float) -> tuple[str, str, str, str]:
    verdict = "holds" if pattern.holds(pre, post) else "does not hold here"
    return pattern.where, pattern.says, f"{pre:.4g} and {post:.4g}", verdict


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
