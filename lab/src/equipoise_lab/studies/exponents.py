"""Exponents over depth: does the largest gain that trains fall like N^(-1/m)?

An edge is where a sweep stops working, seed by seed, and between two settings.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from equipoise.numerics.scaling import PATH_LENGTH, PRINTED_PATH_LENGTH
from equipoise_lab.models import GPTConfig
from equipoise_lab.models.config import Attention
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.figures import Figure, FigureLine, chart
from equipoise_lab.results.finding import StudyFinding, StudyGrid
from equipoise_lab.results.statistics import (
    PairedDifference,
    paired,
    power_law,
    to_decide,
)
from equipoise_lab.running.experiment import FIVE_SEEDS, SEEDS, Arm, Experiment
from equipoise_lab.training.options import TrainOptions


def recipe(quick: bool) -> Experiment:
    """(b) How does the largest initial gain that trains fall with depth?

    Pre-LN, because the bound behind N^(-1/m) is (1 + c·gain^m)^N: an identity path.
    """
    depths = (6, 24) if quick else (6, 12, 24, 48, 96)
    gains = (1.0, 2.0, 4.0, 8.0)
    train = TrainOptions(steps=24, warmup=0, watch=False, batch=4, lr=2e-3)
    shape = GPTConfig(width=32, heads=2, context=32, ffn_width=32)
    arms = tuple(
        Arm(
            name=f"{kind}-N{depth}-g{gain:g}",
            model=replace(shape, attention=kind, depth=depth, gain=gain),
            train=train,
        )
        for kind in get_args(Attention)
        for depth in depths
        for gain in gains
    )
    return Experiment(
        name="exponents",
        question="Does the largest gain that trains fall like N^(-1/m)?",
        arms=arms,
        seeds=SEEDS if quick else FIVE_SEEDS,
        measures=("validation", "loss", "first_gradient"),
    )


def edge(loss_by_setting: Mapping[float, float], *, within: float) -> float:
    """Return the setting at which the loss leaves ``within`` nats of the best.

    Between the last setting that trains and the next, in logarithms, in proportion to
    the loss; infinite if the largest setting still trains. Settings beyond the first
    that failed do not count: beyond the edge, luck is not stability.

    >>> round(edge({1.0: 2.0, 10.0: 2.0, 100.0: 3.0}, within=0.5), 4)
    31.6228
    >>> edge({1.0: 2.0, 10.0: 2.1}, within=0.5)
    inf
    """
    finite = {s: v for s, v in loss_by_setting.items() if math.isfinite(v)}
    if not finite:
        return math.nan
    best = min(finite, key=lambda s: finite[s])
    limit, last = finite[best] + within, best
    for setting in sorted(s for s in loss_by_setting if s > best):
        loss = loss_by_setting[setting]
        if not loss <= limit:
            share = _share(finite[last], limit, loss)
            return math.exp((1 - share) * math.log(last) + share * math.log(setting))
        last = setting
    return math.inf


def _share(inside: float, limit: float, outside: float) -> float:
    """Return how far towards the failed setting the limit lies; half if it diverged."""
    if not math.isfinite(outside):
        return 0.5
    return (limit - inside) / (outside - inside)


def over_seeds(values: Sequence[float]) -> PairedDifference:
    """Return the mean with its 95 % interval over seeds."""
    return paired(values, [0.0] * len(values))


def interval(values: Sequence[float]) -> str:
    """Return mean and interval as text; what is not finite says so.

    >>> interval([1.0, 2.0, 3.0])
    '+2 [-0.484, +4.48]'
    """
    known = [v for v in values if math.isfinite(v)]
    if len(known) < 2:
        return f"{known[0]:+.3g}" if known else "–"
    found = over_seeds(known)
    return f"{found.mean:+.3g} [{found.low:+.3g}, {found.high:+.3g}]"


WITHIN = 0.25
"""Nats above the best gain of the same depth that still count as training."""
TIMES = 10.0
"""A first gradient this many times the smallest gain's counts as exploded."""
Edge = Callable[[Evidence, str, int, int], float]


def finding(evidence: Evidence) -> StudyFinding:
    """Fit the edge over depth per kind and seed; compare with -1/m."""
    kinds = list(dict.fromkeys(o["model.attention"] for o in evidence.arms.values()))
    trained = "; ".join(_sentence(evidence, kind, trains) for kind in kinds)
    started = "; ".join(_sentence(evidence, kind, starts) for kind in kinds)
    return StudyFinding(
        verdict=f"Exponent over depth N of the largest gain that trains: {trained}. "
        f"Of the largest gain whose first gradient does not explode: {started}.",
        grids=[_fits(evidence, kinds), _edges(evidence, kinds)],
        figures=[_figure(evidence, kinds)],
    )


def _depths(evidence: Evidence) -> list[int]:
    return sorted({o["model.depth"] for o in evidence.arms.values()})


def _by_gain(
    evidence: Evidence, kind: str, depth: int, seed: int, measure: str
) -> dict[float, float]:
    return {
        options["model.gain"]: evidence.value(arm, seed, measure)
        for arm, options in evidence.arms.items()
        if (options["model.attention"], options["model.depth"]) == (kind, depth)
        and arm in evidence.runs
    }


def trains(evidence: Evidence, kind: str, depth: int, seed: int) -> float:
    """Return the largest gain whose held-out loss stays near the best."""
    losses = _by_gain(evidence, kind, depth, seed, "validation")
    return edge(losses, within=WITHIN) if losses else math.nan


def starts(evidence: Evidence, kind: str, depth: int, seed: int) -> float:
    """Return the largest gain whose first gradient has not exploded."""
    norms = _by_gain(evidence, kind, depth, seed, "first_gradient")
    if not norms:
        return math.nan
    smallest = norms[min(norms)]
    return edge(
        {g: max(0.0, math.log(norm / smallest)) for g, norm in norms.items()},
        within=math.log(TIMES),
    )


def fitted_exponents(evidence: Evidence, kind: str, found: Edge) -> list[float]:
    """Return a fitted exponent per seed; seeds with too few edges are left out."""
    fitted = [exponent_of(evidence, kind, found, seed) for seed in evidence.seeds]
    return [one for one in fitted if math.isfinite(one)]


def exponent_of(evidence: Evidence, kind: str, found: Edge, seed: int) -> float:
    """Return a seed's exponent over depth; NaN where fewer than three have an edge."""
    points = {n: found(evidence, kind, n, seed) for n in _depths(evidence)}
    known = {n: e for n, e in points.items() if math.isfinite(e)}
    if len(known) < 3:
        return math.nan
    return power_law(list(known), list(known.values())).exponent


def _sentence(evidence: Evidence, kind: str, criterion: Edge) -> str:
    m, printed = PATH_LENGTH[kind], PRINTED_PATH_LENGTH[kind]
    found = fitted_exponents(evidence, kind, criterion)
    if len(found) < 2:
        return f"{kind} (m = {m}): too few depths have an edge to fit"
    held = over_seeds(found)
    inside = held.low <= -1 / m <= held.high
    apart = paired(found, [-1 / m] * len(found))
    return (
        f"{kind} (m = {m}{_as_printed(m, printed)}) {interval(found)}, predicted "
        f"{-1 / m:+.2f}, "
        f"{f'inside the interval{to_decide(apart)}' if inside else 'outside it'}"
    )


def _as_printed(m: int, printed: int) -> str:
    """Return the paper's count, where ours differs."""
    return "" if m == printed else f", {printed} in the paper"


def _fits(evidence: Evidence, kinds: list[str]) -> StudyGrid:
    cells = [
        [
            kind,
            str(PATH_LENGTH[kind]),
            f"{-1 / PATH_LENGTH[kind]:+.3f}",
            f"{-1 / PRINTED_PATH_LENGTH[kind]:+.3f}",
            interval(fitted_exponents(evidence, kind, trains)),
            interval(fitted_exponents(evidence, kind, starts)),
        ]
        for kind in kinds
    ]
    return StudyGrid(
        title="Exponents with 95 % intervals over seeds (exploratory: each by itself). "
        "Trains: held-out loss within "
        f"{WITHIN} nats of the depth's best gain. Starts: first gradient within "
        f"{TIMES:g} × that of the smallest gain",
        head=["attention", "m", "predicted", "as printed", "trains", "starts"],
        cells=cells,
    )


def _edges(evidence: Evidence, kinds: list[str]) -> StudyGrid:
    cells = []
    for kind in kinds:
        for label, found in (("trains", trains), ("starts", starts)):
            by_depth = [
                _range([found(evidence, kind, n, seed) for seed in evidence.seeds])
                for n in _depths(evidence)
            ]
            cells.append([kind, label, *by_depth])
    return StudyGrid(
        title="Largest gain, smallest and largest over seeds (inf: the largest tried)",
        head=["attention", "edge", *(f"N = {n}" for n in _depths(evidence))],
        cells=cells,
    )


def _range(values: list[float]) -> str:
    return f"{min(values):.2f}–{max(values):.2f}"


def _figure(evidence: Evidence, kinds: list[str]) -> Figure:
    depths = _depths(evidence)
    lines = [
        FigureLine(
            name=f"{kind}, {label}",
            x=depths,
            y=[_middle(evidence, kind, n, found) for n in depths],
        )
        for kind in kinds
        for label, found in (("trains", trains), ("starts", starts))
    ]
    title = "Largest gain over depth, geometric mean over seeds"
    return chart("edges", title, lines, x="depth N", y="gain", log="xy")


def _middle(evidence: Evidence, kind: str, depth: int, found: Edge) -> float:
    values = [found(evidence, kind, depth, seed) for seed in evidence.seeds]
    if not all(math.isfinite(v) for v in values):
        return math.nan
    return math.exp(math.fsum(map(math.log, values)) / len(values))
