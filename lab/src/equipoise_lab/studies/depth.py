"""What attention and gradients do over depth: sharpening and vanishing.

Axes, in this file:  Q query.
"""

import math
from dataclasses import replace

import torch

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.interception import Interceptor
from equipoise.numerics.rows.statistics import row_statistics
from equipoise_lab.models import GPTConfig
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.figures import Figure, FigureLine, chart
from equipoise_lab.results.finding import (
    StudyFinding,
    measured,
    over_depth,
    over_training,
    rows,
)
from equipoise_lab.results.statistics import PairedDifference, paired, to_decide
from equipoise_lab.running.execution import TrainedModel
from equipoise_lab.running.experiment import FIVE_SEEDS, SEEDS, Arm, Experiment
from equipoise_lab.training.options import TrainOptions

DEEP = GPTConfig(width=64, depth=24, heads=4, context=64)


def sharpening_recipe(quick: bool) -> Experiment:
    """(e) Does θ stay at 1 as training goes on, and where not?"""
    shape = GPTConfig(width=64, depth=4, heads=4, context=64)
    steps = 100 if quick else 800
    train = TrainOptions(steps=steps, warmup=steps // 10, every=steps // 10, batch=4)
    arms = tuple(
        Arm(
            name=f"lr {lr:g}",
            model=shape,
            train=replace(train, lr=lr, preset="minimal"),
            judges=("positions",),
        )
        for lr in (1e-3, 4e-3)
    )
    return Experiment(
        name="sharpening",
        question="Does θ stay at 1 as training goes on, and where not?",
        arms=arms,
        seeds=SEEDS if quick else FIVE_SEEDS,
        curves=("attention.theta.p5", "attention.entropy", "queries/theta"),
        measures=(
            "theta_p5",
            "theta_p5_start",
            "theta_p50",
            "theta_least",
            "entropy",
            "entropy_start",
            "theta_early",
            "theta_late",
            "sharp_rows",
            "validation",
        ),
    )


def vanishing_recipe(quick: bool) -> Experiment:
    """(f) What does the gradient vanish from in post-LN?"""
    train = TrainOptions(
        steps=30 if quick else 60, warmup=10, every=5, parts_every=5, lr=1e-3
    )
    arms = tuple(
        Arm(name=name, model=replace(DEEP, residual=name), train=train)
        for name in ("pre", "post")
    )
    return Experiment(
        name="vanishing",
        question="What does the post-LN gradient vanish from?",
        arms=arms,
        seeds=SEEDS if quick else FIVE_SEEDS,
        curves=(
            "gradient.norm",
            "backward.norm_factor",
            "backward.branch_factor",
            "residual.token_cosine",
            "gradient/qk",
        ),
        measures=(
            "gradient_least_to_last",
            "gradient_least_to_last_start",
            "ln_norm_factors_start",
            "ln_branch_factors_start",
            "ln_norm_factors",
            "ln_branch_factors",
            "token_cosine_start",
            "token_cosine",
            "first_qk_start",
            "first_qk",
            "validation",
        ),
    )


def positions(trained: TrainedModel) -> dict[str, float]:
    """Return by layer and query the mean θ, and the share of rows with p_max ≥ ½."""
    found: dict[str, float] = {}
    calls: list[AttentionCall] = []
    with torch.no_grad(), Interceptor(anatomy_of(trained.model), calls.append):
        trained.model(trained.batch[0])
    for layer, call in enumerate(calls):
        rows = row_statistics(call.scores(slice(0, call.shape[2])))
        theta_Q = rows.theta_lower.double().mean((0, 1)).tolist()
        sharp_Q = (rows.p_max >= 0.5).double().mean((0, 1)).tolist()
        found |= {f"theta_{layer}_{at}": theta for at, theta in enumerate(theta_Q)}
        found |= {f"sharp_{layer}_{at}": sharp for at, sharp in enumerate(sharp_Q)}
    return found


LEFT = 0.99
"""θ below this has left 1."""
VANISHED = 1e-3


def sharpening_finding(evidence: Evidence) -> StudyFinding:
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
    text = " ".join(_leaves(evidence, arm) for arm in evidence.runs)
    return StudyFinding(
        verdict=text,
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
        FigureLine(name=arm, x=one["x"], y=one["y"])
        for arm, one in evidence.curves.get("queries/theta", {}).items()
    ]
    title = "θ at the end by query position, mean over layers"
    return chart("theta-by-query", title, lines, x="query")


def vanishing_finding(evidence: Evidence) -> StudyFinding:
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
    return StudyFinding(
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
    cosine, qk = (both(name) for name in ("token_cosine", "first_qk"))
    least = [
        _interval(evidence, f"gradient_least_to_last{when}") for when in ("_start", "")
    ]
    lost = "branches" if branch[1] - branch[0] < norm[1] - norm[0] else "norms"
    return (
        f"{_moment('At init', least[0], norm[0], branch[0])} "
        f"{_moment('At the end', least[1], norm[1], branch[1])} "
        f"Of the change, the larger share is in the {lost}. Meanwhile the cosine "
        f"between tokens went from {cosine[0]:.2f} to {cosine[1]:.4f}, and the "
        f"gradient of the first block's Q and K from {qk[0]:.1e} to {qk[1]:.1e} "
        f"(e^{_ln(qk[1] / qk[0]):+.1f})."
    )


def _interval(evidence: Evidence, measure: str) -> PairedDifference:
    """Return ln of post-LN's measure minus ln of ``VANISHED``, over seeds."""
    logs = [_ln(evidence.value("post", seed, measure)) for seed in evidence.seeds]
    return paired(logs, [_ln(VANISHED)] * len(logs))


def _moment(when: str, least: PairedDifference, norm: float, branch: float) -> str:
    """``least``: ln of the weakest layer's share, over what counts as vanished."""
    low, middle, high = (
        VANISHED * _exp(ln) for ln in (least.low, least.mean, least.high)
    )
    needed = to_decide(least)
    word = "vanishes" if high < VANISHED else f"may vanish{needed}"
    word = "does not vanish" if low >= VANISHED else word
    return (
        f"{when} the gradient {word}: the weakest layer has {middle:.1e} of the last "
        f"one's [{low:.1e}, {high:.1e}]; the norms' factors multiply to e^{norm:+.1f}, "
        f"the branches' to e^{branch:+.1f}, together e^{norm + branch:+.1f}."
    )


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _ln(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
