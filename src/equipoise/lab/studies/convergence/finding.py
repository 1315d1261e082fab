"""Does the loss difference know of curvature, and does it say what to grow?"""

import math
import statistics

from equipoise.lab.results.arms import against, rows
from equipoise.lab.results.evidence import Evidence
from equipoise.lab.results.figures import Figure, Line
from equipoise.lab.results.finding import Finding, Grid, measured
from equipoise.lab.results.statistics import Paired

PLACES = {
    "at": "at the trained weights",
    "sharp": "along the sharpest direction",
    "random": "along a random one",
}


def convergence(evidence: Evidence) -> Finding:
    """Compare slopes with the null, and a larger model with as much more data."""
    compared = scaled(evidence)
    said = [_slopes(evidence), _terms(evidence), _scaling(evidence, compared)]
    return Finding(
        verdict=" ".join(said),
        grids=[_grid(compared), measured(evidence, rows(evidence))],
        figures=[_figure(evidence)],
    )


def scaled(evidence: Evidence) -> dict[str, tuple[Paired, Paired]]:
    """Return GPT arm → what four times the data and four times the model change."""
    found = {}
    widths = sorted({int(arm.split("-")[1]) for arm in evidence.runs if "gpt" in arm})
    for small, large in zip(widths, widths[1:], strict=False):
        start = evidence.runs.get(f"gpt-{small}-1x", {})
        data = against(evidence.runs.get(f"gpt-{small}-4x", {}), start, "validation")
        model = against(evidence.runs.get(f"gpt-{large}-1x", {}), start, "validation")
        if data is not None and model is not None:
            found[f"gpt-{small}"] = (data, model)
    return found


def _slopes(evidence: Evidence) -> str:
    null = statistics.fmean(evidence.mean(arm, "slope_null") for arm in evidence.runs)
    said = []
    for place, words in PLACES.items():
        slopes = [evidence.mean(arm, f"slope_{place}") for arm in evidence.runs]
        said.append(f"{words} {min(slopes):.3f} … {max(slopes):.3f}")
    law = [
        evidence.mean(arm, f"variance_law_{place}")
        for arm in evidence.runs
        for place in ("at", "sharp")
    ]
    return (
        f"Log–log slopes of the mean |difference| over k: {', '.join(said)}; i.i.d. "
        f"numbers in the same orders {null:.3f}. The slope says nothing about "
        "curvature. The mean square is Var ℓ/(k(k+1)) times "
        f"{min(law):.3f} … {max(law):.3f}, at the weights and away from them."
    )


def _terms(evidence: Evidence) -> str:
    bends = [evidence.mean(arm, "share_bend") for arm in evidence.runs]
    ours = [evidence.mean(arm, "ours_ratio") for arm in evidence.runs]
    paper = [evidence.mean(arm, "paper_ratio") for arm in evidence.runs]
    fails = max(evidence.mean(arm, "ours_fails") for arm in evidence.runs)
    delta = [evidence.mean(arm, "delta2_ratio") for arm in evidence.runs]
    return (
        "Away from them the curvature term carries "
        f"{min(bends):.0%} … {max(bends):.0%} of the spread between samples: what "
        "curvature changes is the constant, not the exponent. The expansion with its "
        f"remainder exceeds the truth by a median {min(ours):.2g} … {max(ours):.2g} "
        f"(fails in {fails:.0%}), the published form with the kindest constant by "
        f"{min(paper):.2g} … {max(paper):.2g}. Δ₂ on the top eigenspace: closed form "
        f"over sampling {min(delta):.2f} … {max(delta):.2f}."
    )


def _scaling(evidence: Evidence, compared: dict[str, tuple[Paired, Paired]]) -> str:
    if not compared:
        return "Model and data scaling are not both finished yet."
    said = [
        f"{arm}: ×4 data {data.mean:+.3f} nats, ×4 model {model.mean:+.3f}"
        for arm, (data, model) in compared.items()
    ]
    k = [evidence.mean(arm, "k_star_at") for arm in evidence.runs if "gpt" in arm]
    better = sum(model.mean < data.mean for data, model in compared.values())
    verdict = (
        "does not hold here"
        if better == 0
        else "holds here"
        if better == len(compared)
        else "holds in some"
    )
    return (
        f"That small differences mean 'prefer model over data scaling' {verdict}: "
        f"{'; '.join(said)}, though after {min(k):.0f} … {max(k):.0f} samples another "
        "one moves any of these means by less than 1e-3 nats (RMS)."
    )


def _grid(compared: dict[str, tuple[Paired, Paired]]) -> Grid:
    return Grid(
        title="Held-out loss: four times the data against four times the model, "
        "paired over seeds",
        head=["from", "×4 data (steps, each window seen once)", "×4 model (width ×2)"],
        cells=[[arm, str(data), str(model)] for arm, (data, model) in compared.items()],
    )


def _figure(evidence: Evidence) -> Figure:
    """Return held-out loss over data, a line per model size."""
    widths = sorted({int(arm.split("-")[1]) for arm in evidence.runs if "gpt" in arm})
    lines = [
        Line(
            name=f"width {width}",
            x=[1, 4],
            y=[_validation(evidence, f"gpt-{width}-{times}x") for times in (1, 4)],
        )
        for width in widths
    ]
    return Figure(
        name="loss-over-data",
        title="Held-out loss of the byte-level GPT",
        x="data, relative",
        y="nats",
        lines=lines,
        log_x=True,
    )


def _validation(evidence: Evidence, arm: str) -> float:
    return evidence.mean(arm, "validation") if arm in evidence.runs else math.nan
