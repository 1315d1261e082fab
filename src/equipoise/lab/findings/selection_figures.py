"""Mudarisov's figures, drawn from the evidence of a model."""

from collections.abc import Sequence
from typing import Any

from equipoise.lab.evidence import Evidence
from equipoise.lab.figures import Figure, Line


def figures(evidence: Evidence) -> list[Figure]:
    """Return the paper's four figures, the second in its three parts."""
    curves = evidence.curves
    told: Sequence[tuple[str, str]] = (
        ("true", "d̃"),
        ("bound", "our upper bound"),
        ("published", "Theorem 1"),
        ("expected_high", "E[d̃], at most"),
        ("expected_low", "E[d̃], at least"),
    )
    found = [
        Figure(
            name=name,
            title=title,
            x=x,
            y="d̃, mean over heads and queries",
            lines=[Line(name=said, x=one["x"], y=one[key]) for key, said in told],
            log_x=True,
            log_y=True,
        )
        for name, title, x, one in (
            ("fig-2a", "Fig. 2a: N = 5", "L", curves["lengths"]["d̃"]),
            ("fig-2b", "Fig. 2b: longest L", "N", curves["sizes"]["d̃"]),
        )
    ]
    return [*found, _figure_2c(curves), _figure_3(curves), _figure_4(curves)]


def _figure_2c(curves: Any) -> Figure:
    one = curves["critical"]["N"]
    lines = [
        Line(name="ours, main term", x=one["x"], y=one["low"]),
        Line(name="ours, other end", x=one["x"], y=one["high"]),
        Line(name="0.06 L, reported", x=one["x"], y=[0.06 * n for n in one["x"]]),
    ]
    return Figure(
        name="fig-2c",
        title="Fig. 2c: critical N",
        x="L",
        y="N",
        lines=lines,
        log_x=True,
    )


def _figure_3(curves: Any) -> Figure:
    one = curves["separability"]["recall"]
    lines = [
        Line(name="N_s/N", x=one["x"], y=one["mean"], low=one["low"], high=one["high"]),
        Line(name="random sets", x=one["x"], y=one["random"]),
        Line(name="cosine", x=one["x"], y=one["cosine"]),
        Line(name="Thm 2, upper", x=one["x"], y=one["published_high"]),
    ]
    return Figure(
        name="fig-3",
        title="Fig. 3: separability, band over the middle half of heads",
        x="N",
        y="share",
        lines=lines,
        log_x=True,
    )


def _figure_4(curves: Any) -> Figure:
    lines = [
        Line(name=name, x=one["x"], y=one["y"])
        for name, one in curves["gradient"].items()
    ]
    first = next(iter(curves["gradient"].values()))
    lines.append(Line(name="claimed bound", x=first["x"], y=first["claimed"]))
    lines.append(Line(name="our bound, ε→0", x=first["x"], y=first["bound"]))
    return Figure(
        name="fig-4",
        title="Fig. 4: g(T, ε), mean over queries, largest over heads",
        x="T",
        y="g",
        lines=lines,
        log_x=True,
        log_y=True,
    )
