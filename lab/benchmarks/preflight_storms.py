"""Judge the first 20 steps of the storms' runs as a pre-flight would.

``python -m lab.benchmarks.preflight_storms LAB [SEED]``: LAB holds runs made by
``equipoise lab run storms``; those with a smaller seed are left out. A run that fails
counts if its fault is there within the first 20 steps; the others are counted apart.
Runs were sampled every 5 steps, a pre-flight samples every step, so it sees no less.
"""

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.table import publish
from equipoise.judging.judge import Judge
from equipoise.judging.rules.starts import STEPS
from equipoise.store import open_run
from equipoise_lab.storms.labels import Label, labels
from equipoise_lab.storms.plan import HELD_OUT_FAMILIES

CLASSES = 256
"""The lab's models predict bytes."""
WARMED_UP = 25


def warned(folder: Path) -> list[str]:
    """Return the rules that warn of a run within its first steps."""
    run = open_run(folder / "run.eqp")
    news, _ = run.since(0)
    early = [r for r in news.readings if r.step <= STEPS]
    rates = [
        r.values[0][0]
        for r in news.readings
        if r.quantity == "learning_rate" and r.step <= WARMED_UP
    ]
    peak = max(rates, default=math.nan)
    start = Judge({"peak_lr": peak, "classes": CLASSES}, of="start")
    judge = Judge(run.info.details)
    judge.add(early)
    judge.note(f for f in news.findings if f.step <= STEPS)
    found = [*start.add_at_once(early), *judge.firing, *judge.nonfinite]
    return sorted({f.code for f in found if f.severity != "info"})


def kind(label: Label) -> str:
    if label.outcome == "failed":
        return "failed" if label.injected <= STEPS else "failed, fault later"
    return label.outcome


def main() -> None:
    root = Path(sys.argv[1])
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    found: dict[tuple[str, str], list[list[str]]] = {}
    for label in labels(root):
        if label.storm.seed < first:
            continue
        key = (kind(label), label.storm.family)
        found.setdefault(key, []).append(warned(label.folder))
    rows: list[dict[str, Any]] = []
    for (outcome, family), each in sorted(found.items()):
        rules = Counter(rule for rules in each for rule in rules)
        rows.append(
            {
                "outcome": outcome,
                "family": family,
                "held out": "yes" if family in HELD_OUT_FAMILIES else "",
                "runs": len(each),
                "warned": sum(bool(rules) for rules in each),
                "rules": ", ".join(f"{r} {n}" for r, n in rules.most_common(4)),
            }
        )
    totals = {
        outcome.replace(", ", "_").replace(" ", "_"): {
            "runs": sum(r["runs"] for r in rows if r["outcome"] == outcome),
            "warned": sum(r["warned"] for r in rows if r["outcome"] == outcome),
        }
        for outcome in {row["outcome"] for row in rows}
    }
    name = "preflight_storms_fresh" if first else "preflight_storms"
    publish(name, rows, first_seed=first, **totals)


if __name__ == "__main__":
    main()
