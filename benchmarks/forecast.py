"""How well the forecast foresees failures: the storms, its baselines, its diagnosis.

``python -m benchmarks.forecast [RUNS]`` scores the runs of ``lab run storms``
(``lab/storms`` unless given), writes ``benchmarks/results/forecast.json`` and renders
``docs/forecast.md`` from it. Every run is scored by a forecast that was fitted without
its seed and without the held-out families. Seeds from ``plan.UNSEEN`` on were looked
at by this command only, after everything was fixed.
"""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.table import RESULTS, machine
from docs import forecasting
from equipoise.judging.features import NAMES
from equipoise.judging.score import shipped
from equipoise.lab.running.experiment import RESULT
from equipoise.lab.running.runner import lab_directory
from equipoise.lab.storms import evaluation as scored
from equipoise.lab.storms.diagnosis import diagnosis
from equipoise.lab.storms.labels import Label, counts, labels, sensitivity
from equipoise.lab.storms.plan import HELD_OUT_FAMILIES, NORMAL, UNSEEN, plan
from equipoise.lab.storms.probabilities import probabilities
from equipoise.lab.storms.scoring import Score

FILE = RESULTS / "forecast.json"
PAGE = Path(__file__).parents[1] / "docs" / "forecast.md"


def measured(found: list[Label]) -> dict[str, Any]:
    """Return everything the page shows."""
    evidence = scored.gather(found)
    score = scored.detection(evidence.followed)
    allowed = score.false_alarms
    return {
        "runs": _runs(found),
        "options": asdict(evidence.options),
        "detection": scored.summary(score),
        "held_out": {**_parts(score), "shipped": _shipped(evidence)},
        "families": scored.by_family(score),
        "leave_one_family_out": scored.leave_one_family_out(evidence),
        "baselines": scored.baselines(evidence, allowed),
        "best_single": scored.best_single(evidence, NAMES, allowed),
        "probabilities": probabilities(evidence.followed),
        "run_length": scored.run_length(evidence.followed),
        "deep": scored.summary(scored.detection(evidence.deep)),
        "deep_families": scored.by_family(scored.detection(evidence.deep)),
        "diagnosis": diagnosis(evidence),
        "ceiling": scored.ceiling(evidence.followed),
        "misses": scored.misses(evidence.followed),
        "deep_misses": scored.misses(evidence.deep),
    }


def _runs(found: list[Label]) -> dict[str, Any]:
    early = [
        label
        for label in found
        if label.outcome == "failed" and not label.is_forecastable
    ]
    return {
        "planned": len(plan(NORMAL)),
        "recorded": len(found),
        "cpu_minutes": sum(map(_cpu_seconds, found)) / 60,
        "seeds": sorted({label.storm.seed for label in found}),
        "failed": sum(label.outcome == "failed" for label in found),
        "too_early": len(early),
        "counts": counts(found),
        "sensitivity": sensitivity(found),
        "steps": sum(label.steps for label in found),
    }


def _cpu_seconds(label: Label) -> float:
    record = json.loads((label.folder / RESULT).read_text(encoding="utf-8"))
    return float(record["cpu_seconds"])


def _parts(score: Score) -> dict[str, Any]:
    """Return the score on families no fit has met, and on seeds never looked at."""
    held = [t for t in score.trials if t.label.storm.family in HELD_OUT_FAMILIES]
    late = [t for t in score.trials if t.label.storm.seed >= UNSEEN]
    return {
        "families": scored.summary(Score(trials=tuple(held))),
        "fresh seeds": scored.summary(Score(trials=tuple(late))),
    }


def _shipped(evidence: scored.Evidence) -> dict[str, Any]:
    """Return the score of the shipped coefficients on seeds they were not fitted on."""
    model = shipped()
    late = [(r, model) for r, _ in evidence.followed if r.label.storm.seed >= UNSEEN]
    return {
        **scored.summary(scored.detection(late)),
        "fitted_on": list(model.made_by["seeds"]),
    }


def _plain(value: Any) -> Any:
    """Return JSON without NaN: null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def main(runs: Path | None = None) -> None:
    """Measure, write the numbers, render the page."""
    found = labels(runs or lab_directory() / "storms")
    record = {"name": "forecast", "machine": machine(), **measured(found)}
    FILE.write_text(json.dumps(_plain(record), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(forecasting.page(), encoding="utf-8")
    print(f"{FILE}\n{PAGE}\n{json.dumps(_plain(record['detection']), indent=1)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
