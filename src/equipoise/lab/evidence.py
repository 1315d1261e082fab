"""All that an experiment's page is made of, small enough to keep beside the page."""

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from equipoise import __version__
from equipoise.errors import InputError
from equipoise.lab.execution import is_finished, outcome
from equipoise.lab.experiment import Arm, Experiment
from equipoise.lab.series import curves
from equipoise.lab.statistics import Runs

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
    )


def _kept(run: Mapping[str, float], names: tuple[str, ...]) -> dict[str, float]:
    return {name: rounded(run[name]) for name in names if name in run}


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
