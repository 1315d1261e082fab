"""The list of runs: a line for each, and the settings in which they differ."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.judging.verdict import Verdict
from equipoise.report.comparison import details_of, flat_details
from equipoise.report.page_model import Json, finite, shown_name
from equipoise.store import Run
from equipoise.store.level_of_detail import Summary

READ_POINTS, CURVE_POINTS = 640, 40
"""Read, since bins are 16 readings wide; shown, in 120 pixels."""
MOST_SETTINGS, LONGEST_SETTING = 80, 60
MOST_COLUMNS = 24
NO_COLUMNS = ("parameters", "attention_sites", "extra_samples")
"""Details that say what was read, not what was chosen."""


def run_row(run: Run, verdict: Verdict) -> Json:
    """Return a run's line in a list: what it is, how far it is, how it does."""
    steps = run.steps
    settings = flat_details(details_of(run))
    return {
        "label": shown_name(run),
        "created": run.info.created,
        "last": int(steps[-1]) if len(steps) else None,
        "state": run.state,
        "time": run.last_time,
        "seconds": _seconds(run),
        "tokens": _tokens(run),
        "rate": _last(run, "learning_rate"),
        **_loss(run),
        "settings": {
            name: value[:LONGEST_SETTING]
            for name, value in list(settings.items())[:MOST_SETTINGS]
            if not name.startswith(NO_COLUMNS)
        },
        "verdict": {
            "state": verdict.state,
            "headline": verdict.headline,
            "since": verdict.since,
            "recovered": verdict.recovered,
            "unseen": len(verdict.unseen),
        },
    }


def with_columns(rows: Sequence[Json]) -> Json:
    """Return the lines, each with the settings that not all runs share."""
    seen: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.get("settings", {}).items():
            seen.setdefault(name, set()).add(value)
    full = sum("settings" in row for row in rows)
    names = [name for name, values in seen.items() if len(values) > 1]
    # A setting that is another in every run is a name or a time: it groups nothing.
    names.sort(key=lambda name: (len(seen[name]) == full, len(seen[name])))
    chosen = sorted(names[:MOST_COLUMNS])
    shown = [
        {**row, "settings": _only(row.get("settings", {}), chosen)} for row in rows
    ]
    return {"columns": chosen, "runs": shown}


def _only(settings: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: settings[name] for name in names if name in settings}


def _loss(run: Run) -> Json:
    """Return the last loss, and the course of the loss in few points."""
    if "loss" not in run.quantities:
        return {"loss": None, "broken": False, "curve": None}
    found = run.summary("loss", points=READ_POINTS).get("")
    last = float(run.ends("loss")[1].values[0][0])
    curve = None if found is None else _curve(found)
    return {"loss": finite(last), "broken": not math.isfinite(last), "curve": curve}


def _curve(found: Summary) -> Json:
    """Return the means of equal stretches; a stretch that is all NaN is null."""
    parts = np.array_split(
        np.arange(len(found.last)), min(CURVE_POINTS, len(found.last))
    )
    return {
        "steps": [int(found.last[part[-1]]) for part in parts],
        "values": [_mean(found.mean[part]) for part in parts],
    }


def _mean(values: NDArray[np.float64]) -> float | None:
    sound = values[np.isfinite(values)]
    return float(f"{sound.mean():.4g}") if len(sound) else None


def _last(run: Run, quantity: str) -> float | None:
    if quantity not in run.quantities:
        return None
    return finite(float(run.ends(quantity)[1].values[0][0]))


def _tokens(run: Run) -> int | None:
    """Return the tokens read so far: those of a step times the steps."""
    a_step: Any = run.card.sections.get("batch", {}).get("tokens")
    steps = run.steps
    if not isinstance(a_step, int | float) or not len(steps):
        return None
    return int(a_step) * (int(steps[-1]) + 1)


def _seconds(run: Run) -> float | None:
    """Return the time from the making of the run to its last step."""
    try:
        began = datetime.fromisoformat(run.info.created).timestamp()
    except ValueError:
        return None
    ended = run.last_time
    return None if ended is None or ended < began else round(ended - began, 1)
