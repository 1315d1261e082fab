"""What an experiment found: one row per arm, each paired with its baseline."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equipoise.lab.results.evidence import Evidence, gather
from equipoise.lab.results.statistics import Paired, Runs, Summary, paired, summary
from equipoise.lab.running.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm over its finished seeds."""

    arm: str
    values: Mapping[str, Summary]
    against_first: Paired | None
    """Of the experiment's first measure, over the seeds both arms finished; the other
    arm is the experiment's first, or the baseline it names."""
    seeds: tuple[int, ...]


def results(experiment: Experiment, root: Path) -> list[Row]:
    """Return a row per arm with at least one finished run."""
    return rows(gather(experiment, root))


def rows(evidence: Evidence) -> list[Row]:
    """Return the evidence arm by arm."""
    first = next(iter(evidence.arms))
    return [
        Row(
            arm=arm,
            values=_summaries(runs, evidence.measures),
            against_first=against(
                runs,
                evidence.runs.get(evidence.baselines.get(arm, first), {}),
                evidence.measures[0],
            ),
            seeds=tuple(runs),
        )
        for arm, runs in evidence.runs.items()
    ]


def _summaries(runs: Runs, names: tuple[str, ...]) -> dict[str, Summary]:
    columns = {
        name: [run[name] for run in runs.values() if name in run] for name in names
    }
    return {name: summary(values) for name, values in columns.items() if values}


def against(runs: Runs, baseline: Runs, measure: str) -> Paired | None:
    """Return the paired difference over shared seeds; None for an arm and itself."""
    shared = [
        seed
        for seed in runs
        if measure in runs[seed] and measure in baseline.get(seed, {})
    ]
    if runs is baseline or not shared:
        return None
    return paired(
        [runs[seed][measure] for seed in shared],
        [baseline[seed][measure] for seed in shared],
    )
