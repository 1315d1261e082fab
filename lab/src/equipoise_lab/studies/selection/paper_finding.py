"""Finding of ``paper.py``: what Mudarisov et al. report of GPT-2 beside ours."""

import math
from collections.abc import Sequence
from typing import Any

from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.figures import Figure, FigureLine, chart
from equipoise_lab.results.finding import StudyFinding, StudyGrid
from equipoise_lab.results.statistics import power_law

Statement = tuple[str, str, str, bool | None]
"""Where, what the paper reports, ours, whether the pattern holds."""


def finding(evidence: Evidence) -> StudyFinding:
    """Say of each reported pattern whether it holds on this model."""
    lines = [
        *_lengths(evidence.curves["lengths"]["d̃"]),
        *_sizes(evidence.curves["sizes"]["d̃"]),
        _critical(evidence.curves["critical"]["N"]),
        *_separability(evidence.curves["separability"]["recall"]),
        *_gradient(evidence.curves["gradient"]),
    ]
    holds = sum(1 for *_, kept in lines if kept)
    fails = [f"{where} ({says})" for where, says, _, kept in lines if kept is False]
    about = evidence.about
    model = (
        f"{about['model']}, {about['heads']} heads, {about['queries']} queries each, "
        f"up to {max(about['lengths'])} tokens"
    )
    return StudyFinding(
        verdict=f"On {model}: {holds} of {len(lines)} reported patterns hold. Not: "
        f"{'; '.join(fails) or 'none'}.",
        grids=[
            StudyGrid.beside(
                "What the paper reports of GPT-2 124M, and what we read",
                "Mudarisov et al., GPT-2",
                [[*one[:3], _word(one[3])] for one in lines],
            ),
            _recalls(evidence.curves["separability"]["recall"]),
        ],
        figures=figures(evidence),
    )


def _word(kept: bool | None) -> str:
    return {True: "holds", False: "does not hold here", None: "cannot be told"}[kept]


def _lengths(one: dict[str, Any]) -> list[Statement]:
    true, chance = (
        power_law(one["x"], one["true"]),
        power_law(one["x"], one["expected_high"]),
    )
    safe = all(b >= t for b, t in zip(one["published"], one["true"], strict=True))
    loose = max(b / t for b, t in zip(one["published"], one["true"], strict=True))
    ours = max(b / t for b, t in zip(one["bound"], one["true"], strict=True))
    return [
        (
            "Fig. 2a",
            "d̃ of the top 5 grows about linearly with L",
            f"like L^{true.exponent:.2f}",
            0.8 < true.exponent < 1.2,
        ),
        (
            "Fig. 2a",
            "its bound is safe and conservative",
            f"at most {loose:.2f} × the truth (our bound: {ours:.2f} ×)",
            safe,
        ),
        (
            "Fig. 2a",
            "the expectation over random sets grows linearly too",
            f"at most like L^{chance.exponent:.2f}; it is bounded in L",
            0.8 < chance.exponent < 1.2,
        ),
    ]


def _sizes(one: dict[str, Any]) -> list[Statement]:
    at = {int(n): i for i, n in enumerate(one["x"])}
    if not {20, 100} <= at.keys():
        return [("Fig. 2b", "true and expected d̃ meet by N ≈ 100", "too short", None)]
    true, low, high = one["true"], one["expected_low"], one["expected_high"]
    gain = true[at[100]] / true[at[20]] - 1
    apart = true[at[100]] / high[at[100]], true[at[100]] / low[at[100]]
    return [
        (
            "Fig. 2b",
            "beyond N = 20 little is gained",
            f"d̃ changes by {gain:+.0%} from N = 20 to 100",
            abs(gain) < 0.25,
        ),
        (
            "Fig. 2b",
            "true and expected d̃ meet by N ≈ 100",
            f"d̃/E[d̃] is {apart[0]:.1f} to {apart[1]:.1f} at N = 100",
            apart[0] < 1.2,
        ),
    ]


def _critical(one: dict[str, Any]) -> Statement:
    found = [
        (n, low, high)
        for n, low, high in zip(one["x"], one["low"], one["high"], strict=True)
        if math.isfinite(low)
    ]
    says = "the critical N is about 0.06 L, sub-linear"
    seen = one["detectable"][0]
    if not found:
        ours = (
            "none up to L/2: d̃ and E[d̃] differ at every size (KS sees shifts from "
            f"{seen:.2f} σ of heads)"
        )
        return "Fig. 2c", says, ours, False
    shares = [low / n for n, low, _ in found]
    ours = ", ".join(f"{low:.0f} of {n:.0f}" for n, low, _ in found)
    return "Fig. 2c", says, ours, all(0.03 < share < 0.12 for share in shares)


def _separability(one: dict[str, Any]) -> list[Statement]:
    pairs = list(zip(one["x"], one["mean"], strict=True))
    early, late = [m for n, m in pairs if n <= 16], [m for n, m in pairs if n >= 16]
    above = [
        n
        for n, m, b in zip(one["x"], one["mean"], one["published_high"], strict=True)
        if m > b + 1e-6
    ]
    below = all(m >= b for m, b in zip(one["mean"], one["published_low"], strict=True))
    return [
        (
            "Fig. 3",
            "N_s/N falls until N ≈ 16 …",
            f"from {early[0]:.2f} to {early[-1]:.2f}",
            all(a >= b - 0.01 for a, b in zip(early, early[1:], strict=False)),
        ),
        (
            "Fig. 3",
            "… and stays between 0.70 and 0.85",
            f"{min(late):.2f} to {max(late):.2f} (random sets: "
            f"{min(one['random'][-len(late) :]):.3f} to "
            f"{max(one['random'][-len(late) :]):.3f})",
            all(0.65 <= m <= 0.9 for m in late),
        ),
        (
            "Thm 2",
            "its upper bound (as reconstructed) holds and is tight",
            "violated at N = " + ", ".join(f"{n:.0f}" for n in above)
            if above
            else f"holds, by {min(_gaps(one)):.2f} to {max(_gaps(one)):.2f}",
            not above and max(_gaps(one)) < 0.1,
        ),
        ("Thm 2", "its lower bound is conservative", "holds" if below else "no", below),
    ]


def _gaps(one: dict[str, Any]) -> list[float]:
    return [b - m for b, m in zip(one["published_high"], one["mean"], strict=True)]


def _gradient(curves: dict[str, Any]) -> list[Statement]:
    lines = list(curves.values())
    small = dict(zip(lines[0]["x"], lines[0]["y"], strict=True))
    growth = small[0.01] / small[0.1]
    warm = [i for i, T in enumerate(lines[0]["x"]) if T >= 1]
    spread = max(
        max(c["y"][i] for c in lines) / min(c["y"][i] for c in lines) for i in warm
    )
    drop = max(small.values()) / small[1.0]
    claimed = max(
        y / b for c in lines for y, b in zip(c["y"], c["claimed"], strict=True)
    )
    proven = max(y / b for c in lines for y, b in zip(c["y"], c["bound"], strict=True))
    return [
        (
            "Fig. 4",
            "below T = 0.1 sensitivity grows like 1/T",
            f"{growth:.1f} × from T = 0.1 to 0.01",
            5 < growth < 20,
        ),
        (
            "Fig. 4",
            "from T = 1 the curves for ε merge",
            f"within a factor of {spread:.2f}",
            spread < 1.5,
        ),
        (
            "Fig. 4",
            "and lie about 100 × lower than the largest",
            f"{drop:.0f} × lower at T = 1",
            30 < drop < 300,
        ),
        (
            "Cor. 3",
            "g ≤ min{1/4T, √2}",
            f"largest g/claim {claimed:.2f}, g/(our bound) {proven:.2f}: random "
            "directions; the claim itself is false (see claims)",
            claimed <= 1,
        ),
    ]


def _recalls(one: dict[str, Any]) -> StudyGrid:
    names = {
        "mean": "N_s/N",
        "low": "lower quartile",
        "high": "upper quartile",
        "random": "random sets",
        "cosine": "cosine",
        "precision": "precision",
        "published_low": "Thm 2, lower",
        "published_high": "Thm 2, upper",
    }
    cells = [
        [label, *(f"{value:.3g}" for value in one[name])]
        for name, label in names.items()
    ]
    head = ["N", *(f"{n:.0f}" for n in one["x"])]
    title = "Separability over heads (Algorithm 4); Theorem 2 at the last 8 queries"
    return StudyGrid(title=title, head=head, cells=cells)


def figures(evidence: Evidence) -> list[Figure]:
    """Return the paper's four figures, the second in its three parts."""
    curves = evidence.curves
    named: Sequence[tuple[str, str]] = (
        ("true", "d̃"),
        ("bound", "our upper bound"),
        ("published", "Theorem 1"),
        ("expected_high", "E[d̃], at most"),
        ("expected_low", "E[d̃], at least"),
    )
    found = [
        chart(
            name,
            title,
            [FigureLine(name=label, x=one["x"], y=one[key]) for key, label in named],
            x=x,
            y="d̃, mean over heads and queries",
            log="xy",
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
        FigureLine(name="ours, main term", x=one["x"], y=one["low"]),
        FigureLine(name="ours, other end", x=one["x"], y=one["high"]),
        FigureLine(name="0.06 L, reported", x=one["x"], y=[0.06 * n for n in one["x"]]),
    ]
    return chart("fig-2c", "Fig. 2c: critical N", lines, x="L", y="N", log="x")


def _figure_3(curves: Any) -> Figure:
    one = curves["separability"]["recall"]
    lines = [
        FigureLine(
            name="N_s/N", x=one["x"], y=one["mean"], low=one["low"], high=one["high"]
        ),
        FigureLine(name="random sets", x=one["x"], y=one["random"]),
        FigureLine(name="cosine", x=one["x"], y=one["cosine"]),
        FigureLine(name="Thm 2, upper", x=one["x"], y=one["published_high"]),
    ]
    title = "Fig. 3: separability, band over the middle half of heads"
    return chart("fig-3", title, lines, x="N", y="share", log="x")


def _figure_4(curves: Any) -> Figure:
    lines = [
        FigureLine(name=name, x=one["x"], y=one["y"])
        for name, one in curves["gradient"].items()
    ]
    first = next(iter(curves["gradient"].values()))
    lines.append(FigureLine(name="claimed bound", x=first["x"], y=first["claimed"]))
    lines.append(FigureLine(name="our bound, ε→0", x=first["x"], y=first["bound"]))
    title = "Fig. 4: g(T, ε), mean over queries, largest over heads"
    return chart("fig-4", title, lines, x="T", y="g", log="xy")
