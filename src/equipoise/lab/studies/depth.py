"""What attention and gradients do over depth and time: sharpening and vanishing."""

import math

from equipoise.lab.results.arms import rows
from equipoise.lab.results.evidence import Evidence
from equipoise.lab.results.figures import Figure, Line
from equipoise.lab.results.finding import Finding, measured, over_depth, over_training

LEFT = 0.99
"""θ below this has left 1."""
VANISHED = 1e-3


def sharpening(evidence: Evidence) -> Finding:
    """Does θ stay at 1 as training goes on, and where not?"""
    figures = [
        over_training(
            evidence,
            "attention.theta.p5",
            title="θ, 5th percentile: median layer and range",
        ),
        over_training(evidence, "attention.entropy", title="Entropy of rows", y="nats"),
        over_depth(evidence, "attention.theta.p5", title="θ by layer, 5th percentile"),
        _queries(evidence),
    ]
    said = " ".join(_leaves(evidence, arm) for arm in evidence.runs)
    return Finding(
        verdict=said,
        grids=[measured(evidence, rows(evidence))],
        figures=[figure for figure in figures if figure.lines],
    )


def _leaves(evidence: Evidence, arm: str) -> str:
    start, end = (evidence.mean(arm, m) for m in ("theta_p5_start", "theta_p5"))
    p50, least = (evidence.mean(arm, m) for m in ("theta_p50", "theta_least"))
    early, late = (evidence.mean(arm, m) for m in ("theta_early", "theta_late"))
    stays = "stays at" if end >= LEFT else "leaves"
    return (
        f"{arm}: the 5th percentile of θ {stays} 1 ({start:.3f} at init, {end:.3f} at "
        f"the end, {least:.3f} in the sharpest layer; the median row {p50:.4f}); short "
        f"rows (queries 1…7) average {early:.3f}, longer ones {late:.4f}, and "
        f"{evidence.mean(arm, 'sharp_rows'):.1%} of the longer put half of their mass "
        "on one key."
    )


def _queries(evidence: Evidence) -> Figure:
    lines = [
        Line(name=arm, x=one["x"], y=one["y"])
        for arm, one in evidence.curves.get("queries/theta", {}).items()
    ]
    return Figure(
        name="theta-by-query",
        title="θ at the end by query position, mean over layers",
        x="query",
        y="",
        lines=lines,
    )


def vanishing(evidence: Evidence) -> Finding:
    """What does the gradient vanish from in post-LN?"""
    figures = [
        over_depth(evidence, "gradient.norm", title="Gradient by layer", log=True),
        over_depth(
            evidence, "backward.norm_factor", title="LN factor by sublayer", log=True
        ),
        over_depth(
            evidence,
            "backward.branch_factor",
            title="Branch factor by sublayer",
            log=True,
        ),
        over_training(evidence, "residual.token_cosine", title="Cosine between tokens"),
        over_training(
            evidence, "gradient/qk", title="Gradient of all Q and K", log=True
        ),
    ]
    return Finding(
        verdict=_from_what(evidence),
        grids=[measured(evidence, rows(evidence))],
        figures=[figure for figure in figures if figure.lines],
    )


def _from_what(evidence: Evidence) -> str:
    if "post" not in evidence.runs:
        return "post is not finished yet."

    def both(measure: str) -> tuple[float, float]:
        return (
            evidence.mean("post", f"{measure}_start"),
            evidence.mean("post", measure),
        )

    norm, branch = both("ln_norm_factors"), both("ln_branch_factors")
    least, cosine, qk = (
        both(name) for name in ("gradient_least_to_last", "token_cosine", "first_qk")
    )
    lost = "branches" if branch[1] - branch[0] < norm[1] - norm[0] else "norms"
    return (
        f"{_moment('At init', least[0], norm[0], branch[0])} "
        f"{_moment('At the end', least[1], norm[1], branch[1])} "
        f"Of the change, the larger share is in the {lost}. Meanwhile the cosine "
        f"between tokens went from {cosine[0]:.2f} to {cosine[1]:.4f}, and the "
        f"gradient of the first block's Q and K from {qk[0]:.1e} to {qk[1]:.1e} "
        f"(e^{_ln(qk[1] / qk[0]):+.1f})."
    )


def _moment(when: str, least: float, norm: float, branch: float) -> str:
    word = "vanishes" if least < VANISHED else "does not vanish"
    return (
        f"{when} the gradient {word}: the weakest layer has {least:.1e} of the last "
        f"one's; the norms' factors multiply to e^{norm:+.1f}, the branches' to "
        f"e^{branch:+.1f}, together e^{norm + branch:+.1f}."
    )


def _ln(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
