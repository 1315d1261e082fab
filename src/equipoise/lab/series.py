"""Curves of an experiment for its figures: over depth, over training, over queries.

Each is a median over seeds. A name with a slash is not a recorded quantity:
``gradient/qk`` is a group of modules, ``queries/theta`` a judge's answer by position.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.lab.curves import GROUPS, group_norms
from equipoise.lab.execution import RESULT, is_finished
from equipoise.lab.experiment import Experiment
from equipoise.store import Run, open_run

POINTS = 60


def curves(experiment: Experiment, root: Path) -> dict[str, Any]:
    """Return name → arm → numbers, for the figures the experiment asks for."""
    found: dict[str, dict[str, Any]] = {}
    for arm in experiment.arms:
        folders = list(_folders(experiment, root, arm.name))
        for name in experiment.curves:
            one = _curve(name, folders) if folders else None
            if one is not None:
                found.setdefault(name, {})[arm.name] = one
    return found


def _folders(experiment: Experiment, root: Path, arm: str) -> Iterator[Path]:
    for task in experiment.tasks:
        if task.arm.name == arm and is_finished(root / task.folder):
            yield root / task.folder


def _curve(name: str, folders: list[Path]) -> dict[str, Any] | None:
    if name == "loss":
        return _over_seeds([_losses(folder) for folder in folders])
    kind, _, rest = name.partition("/")
    if kind == "queries":
        return _over_seeds([_queries(folder, rest) for folder in folders])
    if kind in {"gradient", "update"} and rest:
        return _over_seeds([_group(folder, kind, rest) for folder in folders])
    runs = [open_run(f / "run.eqp") for f in folders if (f / "run.eqp").is_file()]
    held = [run for run in runs if name in run.quantities]
    return _quantity(held, name) if held else None


def _over_seeds(found: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    shortest = min(len(x) for x, _ in found)
    y = np.median([values[:shortest] for _, values in found], axis=0)
    return {"x": found[0][0][:shortest].tolist(), "y": y.tolist()}


def _record(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / RESULT).read_text())
    return record


def _losses(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss in at most sixty means of neighbouring steps."""
    y = np.array(_record(folder)["losses"], dtype=float)
    size = -(-len(y) // POINTS)
    kept = y[: len(y) // size * size].reshape(-1, size)
    return np.arange(len(kept)) * size + (size - 1) / 2, kept.mean(1)


def _group(folder: Path, kind: str, group: str) -> tuple[np.ndarray, np.ndarray]:
    parts = _record(folder)["parts"]
    return np.array(parts["steps"]), group_norms(parts, kind, GROUPS[group])


def _queries(folder: Path, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over layers of a judge's answer, by query."""
    found: dict[int, list[float]] = {}
    for name, value in _record(folder)["measures"].items():
        words = name.split("_")
        if len(words) == 3 and words[0] == kind and words[2].isdigit():
            found.setdefault(int(words[2]), []).append(value)
    at = sorted(found)
    return np.array(at), np.array([np.mean(found[q]) for q in at])


def _quantity(runs: list[Run], name: str) -> dict[str, Any]:
    """Return over depth the first and last sample, over training the layers' range."""
    tables = [_table(run, name) for run in runs]
    steps = tables[0][0]
    y_ST = np.median([values for _, values in tables], axis=0)
    return {
        "start": y_ST[:, 0].tolist(),
        "end": np.median(y_ST[:, -3:], axis=1).tolist(),
        "x": steps.tolist(),
        "y": np.median(y_ST, axis=0).tolist(),
        "low": y_ST.min(axis=0).tolist(),
        "high": y_ST.max(axis=0).tolist(),
    }


def _table(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values[site, step]), sites in the order of depth."""
    found = run.series(name)
    blocks = run.info.details.get("blocks", [])
    sites = sorted(
        (s for s in found if _place(s, blocks) < len(blocks)),
        key=lambda s: _place(s, blocks),
    ) or list(found)
    rows = [v if v.ndim == 1 else v.mean(1) for v in (found[s][1] for s in sites)]
    return found[sites[0]][0], np.array(rows)


def _place(site: str, blocks: list[str]) -> int:
    inside = (i for i, b in enumerate(blocks) if f"{site}.".startswith(f"{b}."))
    return next(inside, len(blocks))
