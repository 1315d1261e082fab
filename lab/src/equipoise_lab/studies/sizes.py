"""Is size the excuse? Three results again at two larger widths, and their trend.

What a paper needs above 0 is measured at three widths with the same seeds, and fitted
seed by seed over log2(width). Written down before the runs were made:

- size is *no excuse* for a pattern that fails where what it needs does not rise with
  width (Holm over the page, 5 %);
- size *may be the reason* for a pattern that fails and whose need rises with width;
- a pattern that holds and falls with width is *at risk* in larger models.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from equipoise.numerics.scaling import PRINTED_PATH_LENGTH
from equipoise_lab.models import GPTConfig
from equipoise_lab.models.config import Attention
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.figures import Figure, FigureLine, chart
from equipoise_lab.results.finding import StudyFinding, StudyGrid
from equipoise_lab.results.statistics import (
    PairedDifference,
    holm,
    paired,
    per_doubling,
    to_decide,
)
from equipoise_lab.running.experiment import FIVE_SEEDS, SEEDS, Arm, Experiment
from equipoise_lab.studies import exponents, prepost
from equipoise_lab.training.options import TrainOptions

Width = int
WIDTHS, QUICK_WIDTHS = (64, 96, 128), (16, 32)
KINDS: tuple[Attention, ...] = ("standard", "linear")
"""m = 4 and m = 2 as the paper counts, the two ends; what ran keeps these counts."""
PER_HEAD = 16
"""Channels of a head at every width: more heads, not wider ones."""


def _shape(width: Width, depth: int, context: int) -> GPTConfig:
    heads = max(1, width // PER_HEAD)
    return GPTConfig(width=width, depth=depth, heads=heads, context=context)


def prepost_recipe(quick: bool) -> Experiment:
    """The pre-LN and post-LN patterns at three widths, in short runs."""
    steps = 12 if quick else 40
    train = TrainOptions(steps=steps, warmup=4, every=10, batch=4)
    arms = tuple(
        Arm(
            name=f"{form} {width}",
            model=replace(_shape(width, 4 if quick else 24, 32), residual=form),
            train=train,
        )
        for width in (QUICK_WIDTHS if quick else WIDTHS)
        for form in ("pre", "post")
    )
    return Experiment(
        name="prepost-sizes",
        question="Do the pre-LN and post-LN patterns depend on width?",
        arms=arms,
        seeds=SEEDS if quick else FIVE_SEEDS,
        baselines={a.name: a.name.replace("post", "pre") for a in arms},
        measures=tuple(dict.fromkeys(p.measure for p in prepost.EMADI)),
    )


def sharpening_recipe(quick: bool) -> Experiment:
    """θ at the end of 400 steps at three widths and two rates."""
    steps = 20 if quick else 400
    train = TrainOptions(steps=steps, warmup=steps // 10, every=steps // 10, batch=4)
    arms = tuple(
        Arm(
            name=f"lr {lr:g} {width}",
            model=_shape(width, 4, 64),
            train=replace(train, lr=lr, preset="minimal"),
            judges=("positions",),
        )
        for width in (QUICK_WIDTHS if quick else WIDTHS)
        for lr in (1e-3, 4e-3)
    )
    return Experiment(
        name="sharpening-sizes",
        question="Does θ leave 1 earlier in a wider model?",
        arms=arms,
        seeds=SEEDS if quick else FIVE_SEEDS,
        measures=("theta_p5", "theta_p5_start", "sharp_rows", "entropy", "validation"),
    )


def exponents_recipe(quick: bool) -> Experiment:
    """The edge of the gain over depth at three widths.

    Gains above 8 take one step only: they are for the first gradient.
    """
    depths = (2, 3, 4) if quick else (6, 12, 24)
    train = TrainOptions(steps=24, warmup=0, watch=False, batch=4, lr=2e-3)
    arms = tuple(
        Arm(
            name=f"{kind}-w{width}-N{depth}-g{gain:g}",
            model=replace(
                _shape(width, depth, 32), ffn_width=width, attention=kind, gain=gain
            ),
            train=train if gain <= 8 else replace(train, steps=1),
        )
        for width in (QUICK_WIDTHS if quick else (32, 48, 64))
        for kind in KINDS
        for depth in depths
        for gain in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    )
    return Experiment(
        name="exponents-sizes",
        question="Does the exponent of the largest gain depend on width?",
        arms=arms,
        seeds=SEEDS if quick else FIVE_SEEDS,
        measures=("validation", "first_gradient"),
    )


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a statement needs above 0, at each width and seed by seed."""

    where: str
    what: str
    by_width: Mapping[Width, Sequence[float]]

    def at(self, width: Width) -> PairedDifference:
        """Return its mean at one width with the 95 % interval over seeds."""
        values = [v for v in self.by_width[width] if math.isfinite(v)]
        return paired(values or [math.nan], [0.0] * max(1, len(values)))

    @property
    def trend(self) -> PairedDifference:
        """Return its slope per doubling of the width, fitted seed by seed."""
        return per_doubling(self.by_width)


def reading(need: Need, p: float) -> str:
    """Return what the trend says of a statement, by the criterion in this file's head.

    >>> falls = Need(where="", what="", by_width={1: [3, 4], 2: [2, 3], 4: [1, 2.1]})
    >>> reading(falls, 0.01), reading(falls, 0.2)
    ('at risk: holds and falls', 'undecided; no trend shown')
    """
    found = [need.at(width) for width in need.by_width]
    if math.isnan(need.trend.mean):
        return "cannot be fitted at every width"
    moves = 0 if not p < 0.05 else 1 if need.trend.mean > 0 else -1
    if all(one.low > 0 for one in found) or (moves < 0 and found[0].mean > 0):
        return "at risk: holds and falls" if moves < 0 else "holds at every width"
    if moves > 0:
        return "size may be the reason: it rises"
    if all(one.high < 0 for one in found):
        return "fails at every width: size is no excuse"
    return f"undecided; {'it falls' if moves < 0 else 'no trend shown'}"


def needs_of(evidence: Evidence) -> list[Need]:
    """Return what the page's statements need, by the experiment's name."""
    return NEEDS[evidence.name.removesuffix("-quick")](evidence)


def finding(evidence: Evidence) -> StudyFinding:
    """Return the trend with width of everything that the page's statements need."""
    needs = needs_of(evidence)
    p_values = holm([need.trend.p for need in needs])
    read = [reading(need, p) for need, p in zip(needs, p_values, strict=True)]
    counted = {one: read.count(one) for one in dict.fromkeys(read)}
    widths = list(needs[0].by_width)
    return StudyFinding(
        verdict=f"Of {len(needs)} needs over widths {', '.join(map(str, widths))}: "
        + "; ".join(f"{one} ({count})" for one, count in counted.items())
        + ".",
        grids=[
            StudyGrid(
                title="What a statement needs above 0: mean [95 % interval over seeds] "
                "by width, and the slope per doubling of the width (p by Holm over "
                f"{len(needs)} trends)",
                head=["", "needs above 0", *map(str, widths), "per doubling", "p", ""],
                cells=[
                    [need.where, need.what]
                    + [_interval(need.at(width)) for width in widths]
                    + [
                        _interval(need.trend),
                        "–" if math.isnan(p) else f"{p:.2g}",
                        says + _sample(need, says),
                    ]
                    for need, p, says in zip(needs, p_values, read, strict=True)
                ],
            )
        ],
        figures=[_figure(needs)],
    )


def _sample(need: Need, says: str) -> str:
    if not says.startswith("undecided"):
        return ""
    return to_decide(need.trend) or " (by itself its interval is clear of 0)"


def _interval(found: PairedDifference) -> str:
    if math.isnan(found.mean):
        return "–"
    return f"{found.mean:+.3g} [{found.low:+.3g}, {found.high:+.3g}]"


def _figure(needs: Sequence[Need]) -> Figure:
    lines = [
        FigureLine(
            name=f"{need.where}: {need.what}",
            x=list(need.by_width),
            y=[need.at(width).mean for width in need.by_width],
            low=[need.at(width).low for width in need.by_width],
            high=[need.at(width).high for width in need.by_width],
        )
        for need in needs
    ]
    title = "What each statement needs above 0, by width"
    return chart("trend", title, lines, x="width", log="x")


def _widths(evidence: Evidence) -> list[Width]:
    return sorted({options["model.width"] for options in evidence.arms.values()})


def _prepost_needs(evidence: Evidence) -> list[Need]:
    found = []
    for pattern in prepost.EMADI:
        gaps = {
            width: [
                pattern.gaps(
                    *(
                        evidence.value(f"{arm} {width}", seed, pattern.measure)
                        for arm in ("pre", "post")
                    )
                )
                for seed in evidence.seeds
            ]
            for width in _widths(evidence)
        }
        for place, what in enumerate(prepost.parts(pattern)):
            by_width = {w: [gap[place] for gap in of] for w, of in gaps.items()}
            found.append(Need(where=pattern.where, what=what, by_width=by_width))
    return found


def _sharpening_needs(evidence: Evidence) -> list[Need]:
    """θ stays at 1: what 0.99 leaves, the share of flat rows, of either rate."""
    measured: dict[str, Callable[[Mapping[str, float]], float]] = {
        "5th percentile of θ − 0.99": lambda run: run["theta_p5"] - 0.99,
        "0.01 − share of rows with p_max ≥ ½": lambda run: 0.01 - run["sharp_rows"],
    }
    rates = dict.fromkeys(arm.rsplit(" ", 1)[0] for arm in evidence.arms)
    return [
        Need(
            where=rate,
            what=what,
            by_width={
                w: [value(run) for run in evidence.runs[f"{rate} {w}"].values()]
                for w in _widths(evidence)
            },
        )
        for rate in rates
        for what, value in measured.items()
    ]


EDGES = {"trains": exponents.trains, "starts": exponents.starts}
NEAR = 0.1
"""How far from -1/m an exponent may lie."""


def _exponents_needs(evidence: Evidence) -> list[Need]:
    """The largest gain falls like N^(-1/m): what 0.1 leaves beside the distance."""
    found = []
    for kind, edge in itertools.product(KINDS, EDGES):
        m = PRINTED_PATH_LENGTH[kind]
        by_width = {
            w: [NEAR - abs(e + 1 / m) for e in exponents_at(evidence, w, kind, edge)]
            for w in _widths(evidence)
        }
        what = f"{NEAR} − |exponent + 1/{m}|"
        found.append(Need(where=f"{kind}, {edge}", what=what, by_width=by_width))
    return found


def exponents_at(evidence: Evidence, width: Width, kind: str, edge: str) -> list[float]:
    """Return the exponent over depth at one width per seed; NaN where none was fitted.

    Gains that took one step are left out where training is asked for.
    """
    arms = {
        arm: options
        for arm, options in evidence.arms.items()
        if options["model.width"] == width
        and (edge == "starts" or options["train.steps"] > 1)
    }
    part = replace(evidence, arms=arms)
    return [exponents.exponent_of(part, kind, EDGES[edge], s) for s in evidence.seeds]


def exponents_finding(evidence: Evidence) -> StudyFinding:
    """Return the trend, and the exponents themselves."""
    widths = _widths(evidence)
    cells = [
        [kind, edge, f"{-1 / PRINTED_PATH_LENGTH[kind]:+.3f}"]
        + [exponents.interval(exponents_at(evidence, w, kind, edge)) for w in widths]
        for kind in KINDS
        for edge in EDGES
    ]
    grid = StudyGrid(
        title="Exponents over depth with 95 % intervals over seeds, by width (–: no "
        "edge within the gains tried, at some depth)",
        head=["attention", "edge", "predicted", *map(str, widths)],
        cells=cells,
    )
    found = finding(evidence)
    return replace(found, grids=[*found.grids, grid])


NEEDS: dict[str, Callable[[Evidence], list[Need]]] = {
    "prepost-sizes": _prepost_needs,
    "sharpening-sizes": _sharpening_needs,
    "exponents-sizes": _exponents_needs,
}
