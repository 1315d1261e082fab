"""Temperature warm-up: does it replace learning-rate warm-up?"""

import math
from collections.abc import Sequence
from dataclasses import replace

from equipoise_lab.models import GPTConfig
from equipoise_lab.models.config import Residual
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.figures import Figure
from equipoise_lab.results.finding import (
    StudyFinding,
    StudyGrid,
    against,
    over_training,
)
from equipoise_lab.results.measures import GROUPS
from equipoise_lab.results.statistics import (
    PairedDifference,
    corrected,
    paired,
    seeds_to_decide,
    summary,
)
from equipoise_lab.running.experiment import FIVE_SEEDS, SEEDS, Arm, Experiment
from equipoise_lab.training.options import TrainOptions

SHAPE = GPTConfig(width=64, depth=6, heads=4, context=32)
BY_PART = (
    "validation",
    "loss",
    "spikes",
    "gradient_spikes",
    "steps_to_target",
    "early_gradient_qk",
    "early_gradient_vo",
    "early_gradient_feedforward",
    "early_gradient_embedding",
    "early_update_qk",
    "early_update_vo",
    "early_update_feedforward",
    "early_update_embedding",
)


def recipe(quick: bool) -> Experiment:
    """(a) Does temperature warm-up replace learning-rate warm-up?"""
    steps, warm = 100, 20
    base = TrainOptions(steps=steps, warmup=0, watch=False, parts_every=4)
    cool = {"tau_start": 8.0, "tau_steps": warm}
    warmups = {
        "none": base,
        "lr": replace(base, warmup=warm),
        "tau": replace(base, **cool),  # type: ignore[arg-type]
        "both": replace(base, warmup=warm, **cool),  # type: ignore[arg-type]
    }
    residuals: tuple[Residual, ...] = ("post",) if quick else ("post", "pre")
    arms = tuple(
        Arm(
            name=f"{residual}-{name}-{lr:g}",
            model=replace(SHAPE, residual=residual),
            train=replace(train, lr=lr),
        )
        for residual in residuals
        for lr in ((3e-3,) if quick else (1e-3, 3e-3, 1e-2))
        for name, train in warmups.items()
    )
    return Experiment(
        name="temperature",
        question="Does temperature warm-up replace learning-rate warm-up?",
        arms=arms,
        seeds=SEEDS if quick else FIVE_SEEDS,
        baselines={
            arm.name: f"{arm.model.residual}-none-{arm.train.lr:g}" for arm in arms
        },
        curves=("loss", "gradient/qk"),
        measures=BY_PART,
    )


WARMUPS = ("none", "lr", "tau", "both")
Setting = tuple[str, float]
"""(residual form, peak rate)."""


def finding(evidence: Evidence) -> StudyFinding:
    """Compare the four warm-ups at each rate, and say who is throttled."""
    settings = _settings(evidence)
    return StudyFinding(
        verdict=" ".join([_replaces(evidence, settings), _throttled(evidence)]),
        grids=[
            _losses(evidence, settings),
            _sensitivity(evidence, settings),
            _speed(evidence, settings),
            _norms(evidence, settings),
        ],
        figures=_figures(evidence, settings),
    )


def _settings(evidence: Evidence) -> list[Setting]:
    found = [tuple(arm.split("-", 2)) for arm in evidence.runs]
    return list(dict.fromkeys((form, float(rate)) for form, _, rate in found))


def name(setting: Setting, warmup: str) -> str:
    """Return the arm of a setting.

    >>> name(("post", 0.001), "tau")
    'post-tau-0.001'
    """
    return f"{setting[0]}-{warmup}-{setting[1]:g}"


def _difference(
    evidence: Evidence, setting: Setting, a: str, b: str
) -> PairedDifference | None:
    return against(evidence, (name(setting, a), name(setting, b)), "validation")


def _replaces(evidence: Evidence, settings: Sequence[Setting]) -> str:
    """Judge by intervals clear of zero, where there is something to replace."""
    pairs = {
        (a, b): corrected([_difference(evidence, s, a, b) for s in settings])
        for a, b in (("lr", "none"), ("tau", "none"), ("tau", "lr"))
    }
    lower, higher = _clear(pairs["tau", "lr"])
    lr_helped, tau_helped = (_clear(pairs[w, "none"])[0] for w in ("lr", "tau"))
    moved = max(abs(d.mean) for d in pairs["tau", "none"] if d is not None)
    count = f"of {len(settings)} settings"
    if higher > lower:
        answer = "Temperature warm-up does not replace learning-rate warm-up here"
    elif lr_helped and not higher:
        answer = "Temperature warm-up is not worse than learning-rate warm-up here"
    else:
        answer = "Undecided by loss: learning-rate warm-up does not clearly help here"
        answer += _deciding(pairs["lr", "none"])
    return (
        f"{answer}. By p < 0.05 (Holm), {count}: τ ends above LR in {higher} and "
        f"below in {lower}; LR ends below no warm-up in {lr_helped}, τ in "
        f"{tau_helped}. τ moves the held-out loss by at most {moved:.3f} nats against "
        "no warm-up. " + _sensitive(evidence, settings)
    )


def _deciding(pairs: Sequence[PairedDifference | None]) -> str:
    """Say how many seeds would show the clearest difference, and half of them."""
    counts = sorted(n for d in pairs if d is not None and (n := seeds_to_decide(d)))
    if not counts:
        return ""
    half = counts[(len(counts) - 1) // 2]
    return (
        f" ({counts[0]} seeds would show the clearest with 80 % power, {half} half of "
        "them)"
    )


def _clear(pairs: Sequence[PairedDifference | None]) -> tuple[int, int]:
    """Return how many differences are below zero at 5 %, and how many above."""
    known = [pair.mean for pair in pairs if pair is not None and pair.p < 0.05]
    return sum(mean < 0 for mean in known), sum(mean > 0 for mean in known)


def _sensitive(evidence: Evidence, settings: Sequence[Setting]) -> str:
    """Say what each warm-up does to learning-rate sensitivity, paired with none."""
    parts = []
    for form in dict.fromkeys(form for form, _ in settings):
        rates = [rate for other, rate in settings if other == form]
        by_warmup = {
            w: [_excess(evidence, form, w, rates, s) for s in evidence.seeds]
            for w in WARMUPS
        }
        for warmup in ("lr", "tau"):
            pair = paired(by_warmup[warmup], by_warmup["none"])
            parts.append(
                f"{form} {warmup} {pair.mean:+.3f} [{pair.low:+.3f}, {pair.high:+.3f}]"
            )
    return f"Learning-rate sensitivity against no warm-up: {', '.join(parts)}."


def _throttled(evidence: Evidence) -> str:
    ratios = {
        (kind, group): _ratio(evidence, "tau", f"early_{kind}_{group}")
        for kind in ("gradient", "update")
        for group in GROUPS
    }
    listed = ", ".join(
        f"{group} {ratios['gradient', group]:.2f} and {ratios['update', group]:.2f}"
        for group in GROUPS
    )
    text = f"Early gradient and update relative to no warm-up, under τ: {listed}."
    if ratios["gradient", "qk"] < 0.5 < 0.9 < ratios["update", "qk"]:
        text += (
            " τ throttles the gradient of Q and K and nothing else, as the paper says; "
            "but Adam divides by the size of the gradient, so no update gets smaller."
        )
    return text


def _ratio(evidence: Evidence, warmup: str, measure: str) -> float:
    """Return the geometric mean over settings and seeds of warm-up ÷ none."""
    logs = []
    for setting in _settings(evidence):
        for seed in evidence.seeds:
            ours = evidence.value(name(setting, warmup), seed, measure)
            plain = evidence.value(name(setting, "none"), seed, measure)
            if ours > 0 and plain > 0:
                logs.append(math.log(ours / plain))
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def _losses(evidence: Evidence, settings: Sequence[Setting]) -> StudyGrid:
    pairs = corrected([_difference(evidence, s, "tau", "lr") for s in settings])
    cells = [
        [
            f"{form}, {rate:g}",
            *(_cell(evidence, name((form, rate), w), "validation") for w in WARMUPS),
            str(pair or "–"),
        ]
        for (form, rate), pair in zip(settings, pairs, strict=True)
    ]
    return StudyGrid(
        title="Held-out loss, nats, mean ± sd over seeds; τ minus LR is paired, p by "
        f"Holm over {len(settings)} comparisons",
        head=["peak rate", "none", "LR", "τ", "both", "τ minus LR"],
        cells=cells,
    )


def _cell(evidence: Evidence, arm: str, measure: str) -> str:
    found = [r[measure] for r in evidence.runs.get(arm, {}).values() if measure in r]
    return str(summary(found)) if found else "–"


def _sensitivity(evidence: Evidence, settings: Sequence[Setting]) -> StudyGrid:
    """Mean over rates of (loss − the best loss of any warm-up and rate), by seed."""
    cells = []
    for form in dict.fromkeys(form for form, _ in settings):
        rates = [rate for other, rate in settings if other == form]
        for warmup in WARMUPS:
            found = [_excess(evidence, form, warmup, rates, s) for s in evidence.seeds]
            spikes = [
                _cell(evidence, name((form, rate), warmup), "spikes") for rate in rates
            ]
            cells.append([form, warmup, str(summary(found)), " · ".join(spikes)])
    return StudyGrid(
        title="Learning-rate sensitivity: loss above the seed's best, mean over rates",
        head=["residual", "warm-up", "sensitivity, nats", "loss spikes by rate"],
        cells=cells,
    )


def _excess(
    evidence: Evidence, form: str, warmup: str, rates: Sequence[float], seed: int
) -> float:
    def loss(w: str, rate: float) -> float:
        return evidence.value(name((form, rate), w), seed, "validation")

    best = min(loss(w, rate) for w in WARMUPS for rate in rates)
    return math.fsum(loss(warmup, rate) - best for rate in rates) / len(rates)


def _speed(evidence: Evidence, settings: Sequence[Setting]) -> StudyGrid:
    return StudyGrid(
        title="Steps until ten losses average 2.9 nats (inf: never)",
        head=["peak rate", "none", "LR", "τ", "both"],
        cells=[
            [
                f"{form}, {rate:g}",
                *(
                    _cell(evidence, name((form, rate), w), "steps_to_target")
                    for w in WARMUPS
                ),
            ]
            for form, rate in settings
        ],
    )


def _norms(evidence: Evidence, settings: Sequence[Setting]) -> StudyGrid:
    """Who is throttled: early norms relative to no warm-up, over all settings."""
    cells = [
        [
            f"{kind}, {group}",
            *(
                f"{_ratio(evidence, w, f'early_{kind}_{group}'):.3f}"
                for w in WARMUPS[1:]
            ),
        ]
        for kind in ("gradient", "update")
        for group in GROUPS
    ]
    return StudyGrid(
        title="Norms in the first fifth of training ÷ those without warm-up "
        "(geometric mean over rates and seeds)",
        head=["", "LR", "τ", "both"],
        cells=cells,
    )


def _figures(evidence: Evidence, settings: Sequence[Setting]) -> list[Figure]:
    middle = sorted({rate for _, rate in settings})[len(settings) // 4]
    found = []
    for curve, log in (("loss", False), ("gradient/qk", True)):
        for form in dict.fromkeys(form for form, _ in settings):
            whole = over_training(
                evidence, curve, title=f"{curve}, {form}-LN, rate {middle:g}", log=log
            )
            names = {name((form, middle), w) for w in WARMUPS}
            lines = [one for one in whole.lines if one.name in names]
            found.append(replace(whole, name=f"{whole.name}-{form}", lines=lines))
    return [figure for figure in found if figure.lines]
