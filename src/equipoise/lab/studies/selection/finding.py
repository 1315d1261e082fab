"""Softmax and its rivals at growing contexts: what each costs and what it keeps.

Mudarisov's figures, drawn from the evidence of a model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.lab.results.arms import against
from equipoise.lab.results.evidence import Evidence
from equipoise.lab.results.figures import Figure, Line
from equipoise.lab.results.finding import Finding, Grid
from equipoise.lab.results.statistics import Paired, summary

TIMES = (1, 2, 4)
BASE = "softmax"


def selection(evidence: Evidence) -> Finding:
    """Say who loses, who keeps selecting, and what sensitivity that costs."""
    if BASE not in evidence.runs:
        return Finding(verdict="softmax is not finished yet.", grids=[])
    return Finding(
        verdict=" ".join(_said(evidence)),
        grids=[_losses(evidence), _attending(evidence), _separable(evidence)],
        figures=_figures(evidence),
    )


def difference(evidence: Evidence, arm: str, measure: str) -> Paired | None:
    """Return arm minus softmax over the seeds both finished; None for softmax."""
    return against(evidence.runs[arm], evidence.runs[BASE], measure)


def apart(evidence: Evidence, measure: str, *, sign: int) -> list[str]:
    """Return the arms whose interval against softmax lies on one side of 0."""
    found = []
    for arm in evidence.runs:
        pair = difference(evidence, arm, measure)
        if pair is not None and (pair.low > 0 if sign > 0 else pair.high < 0):
            found.append(arm)
    return found


def growth(evidence: Evidence, arm: str, measure: str = "keys") -> float:
    """Return a measure at 4× over the same at 1×."""
    return evidence.mean(arm, f"{measure}_4x") / evidence.mean(arm, f"{measure}_1x")


def _said(evidence: Evidence) -> list[str]:
    keeps = sorted(evidence.runs, key=lambda arm: growth(evidence, arm))
    steady = [arm for arm in keeps if growth(evidence, arm) < 2]
    others = [arm for arm in evidence.runs if arm != BASE]
    theta = {arm: evidence.mean(arm, "theta_4x") for arm in evidence.runs}
    return [
        f"Against softmax at the training length, {_list(evidence, '1x')}.",
        f"With four times the context, {_list(evidence, '4x')}.",
        f"Softmax spreads: {evidence.mean(BASE, 'keys_1x'):.0f} effective keys become "
        f"{evidence.mean(BASE, 'keys_4x'):.0f} ({growth(evidence, BASE):.1f} ×).",
        f"Less than doubling: {', '.join(steady) or 'none'}.",
        f"θ at 4×: {theta[BASE]:.2f} for softmax, "
        + ", ".join(f"{arm} {theta[arm]:.2f}" for arm in steady if arm != BASE)
        + ".",
        f"Of {len(others)} intervals of 95 % one in twenty misses by chance.",
    ]


def _list(evidence: Evidence, at: str) -> str:
    worse = apart(evidence, f"loss_{at}", sign=1)
    better = apart(evidence, f"loss_{at}", sign=-1)
    parts = [
        f"{_named(evidence, arms, at)} {word}"
        for arms, word in ((better, "lose less"), (worse, "lose more"))
        if arms
    ]
    return (
        " and ".join(parts) + "; the rest cannot be told apart"
        if parts
        else ("no rival's loss can be told from it")
    )


def _named(evidence: Evidence, arms: Sequence[str], at: str) -> str:
    return ", ".join(
        f"{arm} ({pair.mean:+.2f})"
        for arm in arms
        if (pair := difference(evidence, arm, f"loss_{at}")) is not None
    )


def _cell(evidence: Evidence, arm: str, measure: str) -> str:
    found = [run[measure] for run in evidence.runs[arm].values() if measure in run]
    return str(summary(found)) if found else "–"


def _losses(evidence: Evidence) -> Grid:
    cells = [
        [
            f"{arm} ({len(evidence.runs[arm])})",
            *(_cell(evidence, arm, f"loss_{m}x") for m in TIMES),
            *(str(difference(evidence, arm, f"loss_{m}x") or "–") for m in (1, 4)),
        ]
        for arm in evidence.runs
    ]
    return Grid(
        title="Loss on the same held-out targets with 1, 2 and 4 training lengths of "
        "context: mean ± sd over (seeds), and paired differences with 95 % intervals",
        head=["", *(f"{m}×" for m in TIMES), "minus softmax, 1×", "minus softmax, 4×"],
        cells=cells,
    )


def _attending(evidence: Evidence) -> Grid:
    columns = {
        "theta": "θ",
        "keys": "effective keys",
        "peak": "largest share",
        "zeros": "share of exact zeros",
        "total": "total weight",
        "rho": "range of scores ρ",
    }
    title = "How the last queries attend, mean over layers, heads and seeds"
    return _changes(evidence, title, columns)


def _separable(evidence: Evidence) -> Grid:
    columns = {
        "recall": "N_s/N",
        "recall_random": "random sets",
        "cosine": "cosine",
        "cosine_random": "random sets, cosine",
        "distance": "d̃/(n − N)",
    }
    title = "Separability of the 8 largest weights' values, and d̃ per token"
    return _changes(evidence, title, columns)


def _changes(evidence: Evidence, title: str, columns: Mapping[str, str]) -> Grid:
    cells = [
        [arm, *(_change(evidence, arm, name) for name in columns)]
        for arm in evidence.runs
    ]
    return Grid(title=title, head=["1× → 4×", *columns.values()], cells=cells)


def _change(evidence: Evidence, arm: str, name: str) -> str:
    first, last = (evidence.mean(arm, f"{name}_{m}x") for m in (1, 4))
    return f"{first:.3g} → {last:.3g}"


def _figures(evidence: Evidence) -> list[Figure]:
    told = (
        ("loss", "Held-out loss, same targets", "nats per token", False),
        ("keys", "Effective keys", "exp(entropy)", True),
        ("theta", "Sensitivity θ", "‖J‖, ∞→1", True),
    )
    shown = [arm for arm in evidence.runs if not arm.endswith("-learnt")]
    return [
        Figure(
            name=f"{name}-over-context",
            title=title,
            x="context, in training lengths",
            y=y,
            lines=[
                Line(
                    name=arm,
                    x=TIMES,
                    y=[evidence.mean(arm, f"{name}_{m}x") for m in TIMES],
                )
                for arm in shown
            ],
            log_x=True,
            log_y=log,
        )
        for name, title, y, log in told
    ]


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
