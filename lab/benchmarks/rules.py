"""What the rules say of runs that fail, and of runs that are healthy.

    python -m lab.benchmarks.rules [STORMS]   storms as recorded, and the runs below
    python -m lab.benchmarks.rules runs       only the runs below

Runs that are made here once, under the lab's folder, and judged from their files:
  table     a 6-layer GPT that dies in six ways, and lives in two (issue "Judgement")
  healthy   Hugging Face GPT-2, Llama and ViT, and a loop in nanoGPT's manner
  tuned     MiniLM and a lab GPT, trained, then tuned on a new task

Thresholds were set on storms of seeds 1 to 4 and on the table; seeds 9 to 11 were
looked at while the forecast was made. Seeds from 12 on were judged once, at the end.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import publish
from equipoise.judging.judge import Judge
from equipoise.judging.rules import RULES
from equipoise.judging.verdict import Verdict
from equipoise.records import Finding
from equipoise.store import open_run
from equipoise.text.verdict_text import worded
from equipoise_lab.running.runner import lab_directory
from equipoise_lab.storms.labels import Label, labels
from equipoise_lab.storms.plan import UNSEEN
from lab.benchmarks.rules_runs import RUNS


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A run, and what the rules said while it went on."""

    group: str
    name: str
    failed: bool | None
    """None where the outcome lies between: left out."""
    verdict: Verdict
    warnings: tuple[Finding, ...]
    onset: int | None = None

    @property
    def rules(self) -> list[str]:
        """The rules about the model that fired, in order."""
        about = (f.code for f in self.warnings if RULES[f.code].about == "model")
        return list(dict.fromkeys(about))

    @property
    def first(self) -> int | None:
        steps = [f.step for f in self.warnings if RULES[f.code].about == "model"]
        return min(steps, default=None)

    @property
    def is_warned_at_end(self) -> bool:
        return self.verdict.state in ("at risk", "failing", "dead")


def judged(path: Path, group: str, name: str, **more: Any) -> Judged:
    """Read a run file to its end, keeping every warning on the way."""
    run = open_run(path)
    judge, found = Judge(run.info.details), []
    while True:
        news, cursor = run.since(judge.cursor)
        found += judge.add(news.readings)
        judge.note(news.findings)
        if cursor == judge.cursor:
            break
        judge.cursor = cursor
    warnings = tuple(f for f in found if f.severity != "info")
    return Judged(
        group=group, name=name, verdict=worded(judge.verdict), warnings=warnings, **more
    )


def storm_group(label: Label) -> str:
    storm = label.storm
    if storm.role != "fault":
        kind = "controls" if storm.role == "control" else "references"
    else:
        kind = {"failed": "failed", "survived": "survivors"}.get(
            label.outcome, "between"
        )
    return f"{kind}, seeds {'from' if storm.seed >= UNSEEN else 'before'} {UNSEEN}"


def storms(root: Path) -> list[Judged]:
    failed = {"failed": True, "survived": False}
    return [
        judged(
            label.folder / "run.eqp",
            storm_group(label),
            f"{label.storm.name} ({label.storm.severity:.2f})",
            failed=failed.get(label.outcome),
            onset=label.onset,
        )
        for label in labels(root)
    ]


def made(root: Path, wanted: Iterable[str] = ()) -> list[Judged]:
    """Make what is not there yet, then judge it."""
    found = []
    for name, (group, failed, make) in RUNS.items():
        path = root / name / "run.eqp"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path.parent)
        if not wanted or group in wanted:
            found.append(judged(path, group, name, failed=failed))
    return found


def row(group: str, runs: Sequence[Judged]) -> dict[str, Any]:
    """Return the counts of a group of runs."""
    counts: Callable[[Callable[[Judged], bool]], int]
    counts = lambda holds: sum(map(holds, runs))  # noqa: E731
    return {
        "runs": group,
        "count": len(runs),
        "named by a rule about the model": counts(lambda r: bool(r.rules)),
        "warned": counts(lambda r: bool(r.warnings)),
        "warned at the end": counts(lambda r: r.is_warned_at_end),
        "not judged": counts(lambda r: r.verdict.state == "not judged"),
        "before onset": counts(
            lambda r: None not in (r.first, r.onset) and (r.first or 0) < (r.onset or 0)
        ),
    }


def exceptions(runs: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return failures that no rule about the model named, and healthy runs warned."""
    return [
        {
            "runs": run.group,
            "name": run.name,
            "state": run.verdict.state,
            "rules": sorted({f.code for f in run.warnings}),
            "sentence": run.verdict.sentence,
        }
        for run in runs
        if (run.failed and not run.rules) or (run.failed is False and run.warnings)
    ]


def main() -> None:
    given = sys.argv[1] if len(sys.argv) > 1 else str(lab_directory() / "storms")
    runs = made(lab_directory() / "rules")
    if given != "runs":
        runs += storms(Path(given))
    groups = sorted({run.group for run in runs})
    rows = [row(group, [r for r in runs if r.group == group]) for group in groups]
    fired = Counter(rule for run in runs if run.failed for rule in run.rules)
    publish(
        "rules",
        rows,
        fired_in_failed_runs=dict(fired.most_common()),
        exceptions=exceptions(runs),
    )


if __name__ == "__main__":
    main()
