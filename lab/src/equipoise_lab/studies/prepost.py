"""Pre-LN, post-LN and DeepNorm: Emadi's experiment at our scale, number beside number.

Same order of depth, same operator norms; and Fig. 3, the theorem against brute force.
"""

import math
import statistics
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from equipoise_lab.models import gpt_preset
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.finding import (
    Row,
    StudyFinding,
    StudyGrid,
    measured,
    over_depth,
    over_training,
    rows,
)
from equipoise_lab.results.statistics import paired, seeds_to_decide, to_decide
from equipoise_lab.running.experiment import FIVE_SEEDS, SEEDS, Arm, Experiment
from equipoise_lab.training.options import TrainOptions


def recipe(quick: bool) -> Experiment:
    """Figs 1, 2, 4, 5, 6 and Table 1: one set of runs, read in several ways."""
    train = (
        TrainOptions(steps=150, warmup=15)
        if quick
        else TrainOptions(steps=240, warmup=24, every=20)
    )
    arms = tuple(
        Arm(name=name, model=replace(gpt_preset("demo"), residual=name), train=train)
        for name in ("pre", "post", "deepnorm")
    )
    return Experiment(
        name="prepost",
        question="Does the place of the norm decide whether a deep model trains?",
        arms=arms,
        seeds=SEEDS if quick else FIVE_SEEDS,
        curves=(
            "loss",
            "gradient.norm",
            "projection.G",
            "attention.theta.p5",
            "attention.theta.p50",
            "sensitivity.S_residual",
        ),
        measures=(
            "validation",
            "loss",
            "spikes",
            "gradient_first_to_last",
            "gradient_least_to_last",
            "gradient_spread",
            "theta_p5",
            "theta_p50",
            "S_residual",
            "S_residual_cv",
            "S_residual_slope",
            "growth_G",
            "growth_B2",
        ),
    )


Gaps = Callable[[float, float], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """One published statement about pre-LN and post-LN, and what would refute it."""

    where: str
    says: str
    measure: str
    needs: str
    """What must be above 0, in words."""
    gaps: Gaps


def _ln(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


NEEDS: dict[str, Gaps] = {
    "post − pre": lambda pre, post: (post - pre,),
    "post − pre, in spikes": lambda pre, post: (post - pre,),
    "ln(pre ÷ post) − ln 100, and ln(10·pre)": lambda pre, post: (
        _ln(pre) - _ln(post) - _ln(100),
        _ln(10 * pre),
    ),
    "the growth of each": lambda pre, post: (pre, post),
    "θ − 0.9995 of each": lambda pre, post: (pre - 0.9995, post - 0.9995),
    "ln(pre ÷ post) − ln 10": lambda pre, post: (_ln(pre) - _ln(post) - _ln(10),),
    "pre − post": lambda pre, post: (pre - post,),
    "pre − 1, and pre ÷ 2 − |post|": lambda pre, post: (pre - 1, pre / 2 - abs(post)),
    "post, and pre − post": lambda pre, post: (post, pre - post),
    "pre − 10·|post|": lambda pre, post: (pre - 10 * abs(post),),
}
"""What must be above 0 → of one seed's pre and post; by its interval, every one."""


def _published() -> Iterator[Pattern]:
    table = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    for given in tomllib.loads(table)["pattern"]:
        yield Pattern(**given, gaps=NEEDS[given["needs"]])


EMADI = tuple(_published())


def parts(pattern: Pattern) -> list[str]:
    """Return a name for each gap of a pattern.

    >>> [parts(one) for one in EMADI[2:4]]
    [['ln(pre ÷ post) − ln 100', 'ln(10·pre)'], ['growth of pre', 'growth of post']]
    """
    if " of each" in pattern.needs:
        word = pattern.needs.removeprefix("the ").removesuffix(" of each")
        return [f"{word} of pre", f"{word} of post"]
    return pattern.needs.split(", and ")


def beside(evidence: Evidence) -> list[tuple[str, str, str, str, str]]:
    """Return where, the paper, ours, what is needed and the verdict, line by line."""
    found = []
    for pattern in EMADI:
        pairs = [
            (pre, post)
            for seed in evidence.seeds
            if math.isfinite(pre := evidence.value("pre", seed, pattern.measure))
            and math.isfinite(post := evidence.value("post", seed, pattern.measure))
        ]
        if pairs:
            means = (statistics.fmean(one) for one in zip(*pairs, strict=True))
            ours = " and ".join(f"{mean:.4g}" for mean in means)
            verdict = judged(pattern, pairs)
            found.append((pattern.where, pattern.says, ours, pattern.needs, verdict))
    return found


def judged(pattern: Pattern, pairs: Sequence[tuple[float, float]]) -> str:
    """Return holds, does not hold here, or undecided with the seeds that would decide.

    Every interval must be above 0: nothing in both arms is no evidence.

    >>> judged(EMADI[1], [(0, 0)] * 3), judged(EMADI[1], [(0, 3), (0, 2), (1, 3)])
    ('undecided', 'holds')
    """
    seeds = [pattern.gaps(pre, post) for pre, post in pairs]
    tests = [paired(gap, [0.0] * len(gap)) for gap in zip(*seeds, strict=True)]
    if all(test.low > 0 for test in tests):
        return "holds"
    if any(test.high < 0 for test in tests):
        return "does not hold here"
    counts = [n for test in tests if (n := seeds_to_decide(test)) is not None]
    if not counts:
        return "undecided"
    return f"undecided; {max(counts)} seeds would decide with 80 % power"


def finding(evidence: Evidence) -> StudyFinding:
    """Figs 1, 2, 4, 5, 6, Table 1 and E.6."""
    found = rows(evidence)
    lines = beside(evidence)
    verdict = sentence(found)
    if lines:
        verdict += f" {_counted([line[-1] for line in lines])}"
    paper = StudyGrid(
        title="The paper's numbers (774M parameters, 5000 steps) beside ours; a "
        "pattern holds where the 95 % interval over seeds of what it needs lies above "
        "0 (exploratory: not corrected for their number)",
        head=["", "Emadi 2026", "ours, pre and post", "needs above 0", "pattern"],
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
    return StudyFinding(
        verdict=verdict,
        grids=[measured(evidence, found), paper],
        figures=[f for f in figures if f.lines],
    )


def _counted(verdicts: Sequence[str]) -> str:
    held = verdicts.count("holds")
    failed = verdicts.count("does not hold here")
    return (
        f"Of {len(verdicts)} published patterns {held} hold at this scale, {failed} do "
        f"not; undecided: {len(verdicts) - held - failed}."
    )


def sentence(rows: Sequence[Row]) -> str:
    """Say whether Emadi's pattern holds: post-LN starves its early layers."""
    by_arm = {row.arm: row for row in rows}
    if not {"pre", "post"} <= by_arm.keys():
        return "pre and post are not both finished yet."
    pre, post = by_arm["pre"], by_arm["post"]
    found = [_starved(post), _carried(pre), _apart(pre, post)]
    if "deepnorm" in by_arm:
        found.append(_scaled(by_arm["deepnorm"]))
    return " ".join(found)


def _mean(row: Row, measure: str) -> float | None:
    found = row.values.get(measure)
    return found.mean if found else None


def _starved(post: Row) -> str:
    least = _mean(post, "gradient_least_to_last")
    if least is None:
        return "Gradients over depth were not recorded."
    text = f"post-LN's weakest layer gets {least:.1e} of the last layer's gradient"
    return f"{text}: its early layers do not learn." if least < 1e-3 else f"{text}."


def _carried(pre: Row) -> str:
    spread = _mean(pre, "gradient_spread")
    if spread is None:
        return ""
    return f"pre-LN's layers 2…N differ by a factor of {spread:.2g}."


def _apart(pre: Row, post: Row) -> str:
    a, b = _mean(pre, "validation"), _mean(post, "validation")
    if a is None or b is None:
        return ""
    better, worse = ("pre", "post") if a < b else ("post", "pre")
    return f"{better}-LN ends {abs(a - b):.2f} nats per token below {worse}-LN."


def _scaled(deepnorm: Row) -> str:
    """Say how post-LN with scaled branches compares with pre-LN, the first arm."""
    least, pair = _mean(deepnorm, "gradient_least_to_last"), deepnorm.against_first
    if least is None or pair is None:
        return ""
    text = f"DeepNorm's weakest layer gets {least:.2g} of the last layer's gradient"
    if not pair.p < 0.05:
        return f"{text}; its loss cannot be told from pre-LN's{to_decide(pair)}."
    side = "below" if pair.mean < 0 else "above"
    return f"{text}, and it ends {abs(pair.mean):.2f} nats {side} pre-LN."


ROUNDING = 1e-9


def theorem_finding(evidence: Evidence) -> StudyFinding:
    """Say whether θ/τ is exact, and whether the paper's heuristic is θ."""
    worst = max(evidence.mean(arm, "theta_error") for arm in evidence.runs)
    wrong = {arm: evidence.mean(arm, "heuristic_wrong") for arm in evidence.runs}
    off = max(evidence.mean(arm, "heuristic_error") for arm in evidence.runs)
    most = max(wrong, key=lambda arm: wrong[arm])
    exact = "holds" if worst < ROUNDING else "does not hold here"
    match = "holds" if max(wrong.values()) == 0 else "does not hold here"
    lines = [
        ["Fig. 3", "‖J‖ = θ/τ, exactly", f"worst |θ - τ‖J‖| {worst:.1e}", exact],
        [
            "App. E.2",
            "the sorted-prefix heuristic matches exhaustive search for L ≤ 16",
            f"differs in up to {wrong[most]:.0%} of rows ({most}), by up to {off:.2g}",
            match,
        ],
    ]
    return StudyFinding(
        verdict=f"The theorem {exact} (worst error {worst:.1e}); that the heuristic "
        f"equals θ {match}: it differs in up to {wrong[most]:.0%} of rows.",
        grids=[
            StudyGrid.beside("The paper's statement beside ours", "Emadi 2026", lines),
            _points(evidence),
        ],
    )


def _points(evidence: Evidence) -> StudyGrid:
    cells = [
        [
            arm,
            f"{evidence.mean(arm, 'norm'):.4g}",
            f"{evidence.mean(arm, 'theta_error'):.1e}",
            f"{evidence.mean(arm, 'heuristic_error'):.1e}",
            f"{evidence.mean(arm, 'heuristic_wrong'):.0%}",
        ]
        for arm in evidence.runs
    ]
    head = ["rows", "‖J‖, mean", "θ/τ, worst", "heuristic, worst", "heuristic wrong"]
    return StudyGrid(title="Means over seeds, 200 rows each", head=head, cells=cells)
