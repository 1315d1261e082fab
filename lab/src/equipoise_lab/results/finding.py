"""A finding: the sentence, tables and figures that follow from evidence.

Pure: numbers in, text out. A table has one column per arm, each paired with its
baseline; a measure without a name in ``NAMES`` is called by its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from equipoise_lab.results.evidence import Evidence, gather
from equipoise_lab.results.figures import Figure, FigureLine, chart
from equipoise_lab.results.statistics import (
    PairedDifference,
    Runs,
    SampleSummary,
    corrected,
    paired,
    summary,
)
from equipoise_lab.running.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm over its finished seeds."""

    arm: str
    values: Mapping[str, SampleSummary]
    against_first: PairedDifference | None
    """Of the experiment's first measure, over the seeds both arms finished; the other
    arm is the experiment's first, or the baseline it names."""
    seeds: tuple[int, ...]


def results(experiment: Experiment, root: Path) -> list[Row]:
    """Return a row per arm with at least one finished run."""
    return rows(gather(experiment, root))


def rows(evidence: Evidence) -> list[Row]:
    """Return the evidence arm by arm; p-values hold for all comparisons at once."""
    found = [
        Row(
            arm=arm,
            values=_summaries(runs, evidence.measures),
            against_first=against(
                evidence, (arm, baseline(evidence, arm)), evidence.measures[0]
            ),
            seeds=tuple(runs),
        )
        for arm, runs in evidence.runs.items()
    ]
    return _corrected(found)


def _corrected(found: list[Row]) -> list[Row]:
    pairs = corrected([row.against_first for row in found])
    return [
        replace(row, against_first=pair) for row, pair in zip(found, pairs, strict=True)
    ]


def _summaries(runs: Runs, names: tuple[str, ...]) -> dict[str, SampleSummary]:
    columns = {
        name: [run[name] for run in runs.values() if name in run] for name in names
    }
    return {name: summary(values) for name, values in columns.items() if values}


def against(
    evidence: Evidence,
    arms: tuple[str, str],
    measure: str,
    *,
    change: Callable[[float], float] | None = None,
) -> PairedDifference | None:
    """Return the paired difference over shared seeds; None for an arm and itself.

    ``change`` is applied to every number first: the difference of logarithms is one of
    ratios.
    """
    ours, theirs = (evidence.runs.get(arm, {}) for arm in arms)
    shared = [
        seed
        for seed in ours
        if measure in ours[seed] and measure in theirs.get(seed, {})
    ]
    if ours is theirs or not shared:
        return None
    one, other = ([runs[seed][measure] for seed in shared] for runs in (ours, theirs))
    if change is None:
        return paired(one, other, digits=evidence.digits)
    return paired(list(map(change, one)), list(map(change, other)))


NAMES = {
    "validation": "held-out loss, nats",
    "loss": "training loss, last tenth",
    "accuracy": "held-out accuracy",
    "spikes": "loss spikes",
    "gradient_spikes": "gradient above 5 × clip",
    "gradient_first_to_last": "gradient, first layer ÷ last",
    "gradient_least_to_last": "gradient, weakest layer ÷ last",
    "gradient_spread": "gradient, layers 2…N, largest ÷ smallest",
    "theta_p5": "θ, 5th percentile",
    "theta_p50": "θ, median",
    "theta_p100": "θ, largest",
    "S": "S, median over layers",
    "S_cv": "S, spread over layers (CV)",
    "S_residual": "S on the residual stream, median",
    "S_residual_cv": "S on the residual stream, CV",
    "S_residual_slope": "ln S over depth, slope",
    "theta_least": "θ, 5th percentile, sharpest layer",
    "norm_factor": "norm's factor on the gradient",
    "branch_factor": "branch's factor on the gradient",
    "token_cosine": "cosine between tokens",
    "lipschitz": "local constant of attention, median",
    "sharpness": "preconditioned sharpness",
    "steps_to_target": "steps to 2.9 nats",
    "first_gradient": "gradient of the first step",
    "early_gradient_qk": "early gradient, Q and K",
    "early_gradient_vo": "early gradient, V and O",
    "early_gradient_feedforward": "early gradient, feed-forward",
    "early_gradient_embedding": "early gradient, embeddings",
    "early_update_qk": "early update, Q and K",
    "early_update_vo": "early update, V and O",
    "early_update_feedforward": "early update, feed-forward",
    "early_update_embedding": "early update, embeddings",
    "gradient_least_to_last_start": "gradient, weakest layer ÷ last, at init",
    "ln_norm_factors": "Σ ln of the norms' factors",
    "ln_norm_factors_start": "Σ ln of the norms' factors, at init",
    "ln_branch_factors": "Σ ln of the branches' factors",
    "ln_branch_factors_start": "Σ ln of the branches' factors, at init",
    "token_cosine_start": "cosine between tokens, at init",
    "first_qk": "gradient of the first block's Q and K",
    "first_qk_start": "gradient of the first block's Q and K, at init",
    "entropy": "entropy of rows, nats",
    "entropy_start": "entropy of rows, nats, at init",
    "theta_p5_start": "θ, 5th percentile, at init",
    "theta_early": "θ, mean over queries 1…7",
    "theta_late": "θ, mean over queries 8…",
    "sharp_rows": "share of rows (queries 8…) with p_max ≥ ½",
    "growth_G": "Δ ln G from first to last",
    "growth_B2": "Δ ln B̄² from first to last",
    "mean_loss_at": "mean loss of the samples, at the weights",
    "mean_loss_sharp": "mean loss, along the sharpest direction",
    "mean_loss_random": "mean loss, along a random direction",
    "slope_null": "slope, i.i.d. numbers",
    "slope_at": "slope, at the weights",
    "slope_sharp": "slope, along the sharpest direction",
    "slope_random": "slope, along a random direction",
    "variance_law_at": "mean square ÷ Var/(k(k+1)), at the weights",
    "variance_law_sharp": "mean square ÷ Var/(k(k+1)), sharpest direction",
    "variance_law_random": "mean square ÷ Var/(k(k+1)), random direction",
    "share_value": "spread between samples: value term",
    "share_slope": "spread between samples: gradient term",
    "share_bend": "spread between samples: curvature term",
    "share_rest": "spread between samples: remainder",
    "paper_fails": "published form, share of samples above it",
    "paper_ratio": "published form ÷ truth, median",
    "ours_fails": "ours, share of samples above it",
    "ours_ratio": "ours ÷ truth, median",
    "delta2_ratio": "Δ₂ on the top eigenspace, closed form ÷ sampling",
    "k_star_at": "k* for 1e-3 nats, by the variance law",
    "gradient_norm": "gradient at the weights",
    "sharpness_plain": "sharpness",
}


@dataclass(frozen=True, kw_only=True)
class StudyGrid:
    """A table: what it shows, its head, its cells."""

    title: str
    head: Sequence[str]
    cells: Sequence[Sequence[str]]

    @classmethod
    def beside(cls, title: str, paper: str, cells: Sequence[Sequence[str]]) -> Self:
        """Return what a paper states, what we found, and whether its pattern holds."""
        return cls(title=title, head=["", paper, "ours", "pattern"], cells=cells)


@dataclass(frozen=True, kw_only=True)
class StudyFinding:
    """What an experiment says."""

    verdict: str
    grids: Sequence[StudyGrid]
    figures: Sequence[Figure] = field(default=())


Finder = Callable[[Evidence], StudyFinding]


def plain(evidence: Evidence) -> StudyFinding:
    """Return the experiment's table and its paired comparisons."""
    found = rows(evidence)
    pairs = [
        f"{row.arm} minus {baseline(evidence, row.arm)}: {row.against_first}"
        for row in found
        if row.against_first
    ]
    verdict = "; ".join(pairs) or "nothing to compare yet."
    figures = [over_training(evidence, name) for name in evidence.curves]
    return StudyFinding(
        verdict=verdict, grids=[measured(evidence, found)], figures=figures
    )


def baseline(evidence: Evidence, arm: str) -> str:
    """Return the arm that this one is compared with."""
    return evidence.baselines.get(arm, next(iter(evidence.arms)))


def measured(evidence: Evidence, found: Sequence[Row]) -> StudyGrid:
    """Return a line per measure and a column per arm; the last line compares pairs."""
    cells = [
        [NAMES.get(name, name), *(str(row.values.get(name, "–")) for row in found)]
        for name in evidence.measures
        if any(name in row.values for row in found)
    ]
    first = evidence.measures[0]
    versus = {baseline(evidence, row.arm) for row in found if row.against_first}
    text = f"minus {versus.pop()}" if len(versus) == 1 else "minus its baseline"
    pairs = [str(row.against_first or "–") for row in found]
    several = sum(row.against_first is not None for row in found)
    holms = f"; p by Holm over {several} comparisons" if several > 1 else ""
    return StudyGrid(
        title="Mean ± standard deviation over seeds; the last line is paired, "
        f"with its 95 % interval{holms}",
        head=["", *(f"{row.arm} ({len(row.seeds)})" for row in found)],
        cells=[*cells, [f"{NAMES.get(first, first)}: {text}", *pairs]],
    )


def over_training(
    evidence: Evidence, name: str, *, title: str = "", y: str = "", log: bool = False
) -> Figure:
    """Return a quantity over steps, a line per arm; layers' range as a band."""
    lines = [
        FigureLine(
            name=arm,
            x=one["x"],
            y=one["y"],
            low=one.get("low", ()),
            high=one.get("high", ()),
        )
        for arm, one in _drawn(evidence, name)
    ]
    file, axes = _file(name, "training"), "y" if log else ""
    return chart(file, title or name, lines, x="step", y=y, log=axes)


def over_depth(
    evidence: Evidence, name: str, *, title: str, log: bool = False
) -> Figure:
    """Return a quantity over layers at the first sample and at the end, per arm."""
    lines = [
        FigureLine(
            name=f"{arm}, {when}", x=list(range(1, len(one[key]) + 1)), y=one[key]
        )
        for arm, one in _drawn(evidence, name)
        for key, when in (("end", "end"), ("start", "init"))
    ]
    file, axes = _file(name, "depth"), "y" if log else ""
    return chart(file, title, lines, x="layer", y="", log=axes)


def _drawn(evidence: Evidence, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    return list(evidence.curves.get(name, {}).items())


def _file(name: str, kind: str) -> str:
    return f"{name.replace('.', '-').replace('/', '-')}-{kind}"
