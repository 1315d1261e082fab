"""The evidence of an experiment: all that its page is made of, small enough to commit.

Curves are medians over seeds. A name with a slash is not a recorded quantity:
``gradient/qk`` is a group of modules, ``queries/theta`` a measurement by position.
"""

import json
import math
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from equipoise import __version__
from equipoise.errors import InputError
from equipoise.store import Run, open_run
from equipoise_lab.results.measures import GROUPS, group_norms
from equipoise_lab.results.statistics import Runs
from equipoise_lab.running.execution import is_finished, outcome
from equipoise_lab.running.experiment import RESULT, Arm, Experiment

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
    """Return the mean over layers of a measurement, by query."""
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


DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """An experiment's numbers: every finding, table and figure follows from these."""

    name: str
    question: str
    measures: tuple[str, ...]
    seeds: tuple[int, ...]
    arms: Mapping[str, Mapping[str, Any]]
    """Arm → the options in which arms differ."""
    baselines: Mapping[str, str]
    """Arm → the arm it is compared with; the first arm unless named."""
    runs: Mapping[str, Runs]
    curves: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    digits: int | None = DIGITS
    """To which the runs' numbers were rounded; None: not at all. Files without it were
    written when they were."""

    def mean(self, arm: str, measure: str) -> float:
        """Return the mean over seeds; NaN where nothing was measured."""
        found = [run[measure] for run in self.runs[arm].values() if measure in run]
        return math.fsum(found) / len(found) if found else math.nan

    def value(self, arm: str, seed: int, measure: str) -> float:
        """Return one run's number; NaN where it was not measured."""
        return self.runs.get(arm, {}).get(seed, {}).get(measure, math.nan)

    def to_json(self) -> str:
        rows = {k: _line(v) for k, v in asdict(self).items()}
        body = ",\n".join(f'"{name}": {row}' for name, row in rows.items())
        return f"{{\n{body}\n}}\n"

    @classmethod
    def from_json(cls, text: str) -> "Evidence":
        given = json.loads(text)
        runs = {
            arm: {int(seed): run for seed, run in by_seed.items()}
            for arm, by_seed in given.pop("runs").items()
        }
        given |= {name: tuple(given[name]) for name in ("measures", "seeds")}
        return cls(**given, runs=runs)


def gather(experiment: Experiment, root: Path) -> Evidence:
    """Return what the finished runs under ``root`` came to."""
    found: dict[str, Runs] = {arm.name: {} for arm in experiment.arms}
    spent = 0.0
    for task in experiment.tasks:
        folder = root / task.folder
        if is_finished(folder):
            run = outcome(folder)
            spent += run["cpu_seconds"]
            found[task.arm.name][task.seed] = _kept(run, experiment.measures)
    if not any(found.values()):
        raise InputError(
            f"{experiment.name} has no finished run in {root}; "
            f"run it first: equipoise lab run {experiment.name}"
        )
    return Evidence(
        name=experiment.name,
        question=experiment.question,
        measures=experiment.measures,
        seeds=experiment.seeds,
        arms=varied(experiment.arms),
        baselines=dict(experiment.baselines),
        runs={arm: runs for arm, runs in found.items() if runs},
        curves=rounded(curves(experiment, root)),
        about={**_about(experiment), "cpu_minutes": rounded(spent / 60)},
        digits=None,
    )


def _kept(run: Mapping[str, float], names: tuple[str, ...]) -> dict[str, float]:
    return {name: run[name] for name in names if name in run}


def _about(experiment: Experiment) -> dict[str, Any]:
    return {
        "command": _command(experiment.name),
        **surroundings(),
        "options": common(experiment.arms),
    }


def _command(name: str) -> str:
    quick = " --quick" if name.endswith("-quick") else ""
    return f"equipoise lab run {name.removesuffix('-quick')}{quick}"


def surroundings() -> dict[str, Any]:
    """Return the class of machine and the versions a result was made with."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {memory:.0f} GiB, no GPU"
    if torch.cuda.is_available():
        machine = machine.replace("no GPU", torch.cuda.get_device_name())
    return {
        "machine": machine,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "equipoise": __version__,
    }


def flat(options: Any, prefix: str = "") -> dict[str, Any]:
    """Return an option tree as one level: ``train.lr`` and its like."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _options(arms: tuple[Arm, ...]) -> list[dict[str, Any]]:
    listed = [flat(asdict(arm)) for arm in arms]
    for one in listed:
        one.pop("name")
        one.pop("train.seed")
    return listed


def varied(arms: tuple[Arm, ...]) -> dict[str, dict[str, Any]]:
    """Return per arm the options that are not the same in all."""
    listed = _options(arms)
    names = [n for n in listed[0] if any(o.get(n) != listed[0][n] for o in listed)]
    return {
        arm.name: {n: one.get(n) for n in names}
        for arm, one in zip(arms, listed, strict=True)
    }


def common(arms: tuple[Arm, ...]) -> dict[str, Any]:
    """Return what all arms share and the reader must know to repeat them."""
    shown = ("width", "depth", "heads", "context", "ffn_width", "residual", "attention")
    names = [f"model.{n}" for n in shown]
    names += [f"train.{n}" for n in ("steps", "batch", "lr", "warmup", "weight_decay")]
    names += ["data.source"]
    listed = _options(arms)
    first = listed[0]
    return {
        n: first[n]
        for n in names
        if first.get(n) is not None and all(o.get(n) == first[n] for o in listed)
    }


def rounded(value: Any) -> Any:
    """Return numbers with four digits, through lists and mappings."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _line(value: Any) -> str:
    """Return JSON with a line for each entry of a mapping: small, and it diffs."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False)
    rows = [f" {json.dumps(str(k))}: {_compact(v)}" for k, v in value.items()]
    return "{\n" + ",\n".join(rows) + "\n}"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
