"""An experiment is arms × seeds; every arm sees the same seeds and the same data."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from equipoise_lab.data import DataOptions
from equipoise_lab.models import GPTConfig, ViTConfig
from equipoise_lab.options import added_later, from_mapping, keyed, require
from equipoise_lab.running.workers import Job
from equipoise_lab.training.options import TrainOptions

SEEDS = (42, 123, 456)  # Emadi's
FIVE_SEEDS = (*SEEDS, 789, 1011)
RESULT = "result.json"


def short_hash(line: str) -> str:
    """Return eight digits that stand for a line of text.

    >>> short_hash("")
    'e3b0c442'
    """
    return hashlib.sha256(line.encode()).hexdigest()[:8]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting under comparison."""

    name: str
    model: GPTConfig | ViTConfig
    train: TrainOptions = field(default_factory=TrainOptions)
    data: DataOptions = field(default_factory=DataOptions)
    normaliser: str = ""
    """Of attention rows, by name; softmax unless given."""
    judges: tuple[str, ...] = added_later(())
    """What else is measured of the trained model, by name; see ``studies.catalogue``.
    The field keeps its name because a run's key is made of it."""


@dataclass(frozen=True, kw_only=True)
class Task(Job):
    """One arm with one seed: a run to be made."""

    arm: Arm
    seed: int

    @property
    def key(self) -> str:
        """Return eight digits of everything that decides the outcome."""
        given = {"kind": self._kind, **keyed(self.arm), "seed": self.seed}
        return short_hash(json.dumps(given, sort_keys=True))

    @property
    def name(self) -> str:
        return f"{self.arm.name} {self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.arm.name) / f"seed-{self.seed}-{self.key}"

    @property
    def result(self) -> Path:
        return self.folder / RESULT

    def to_mapping(self) -> dict[str, Any]:
        return {"kind": self._kind, **asdict(self.arm), "seed": self.seed}

    @property
    def _kind(self) -> str:
        return "vit" if isinstance(self.arm.model, ViTConfig) else "gpt"

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> "Task":
        rest = dict(given)
        kind = ViTConfig if rest.pop("kind") == "vit" else GPTConfig
        seed, model = rest.pop("seed"), from_mapping(kind, rest.pop("model"))
        return cls(arm=from_mapping(Arm, {**rest, "model": model}), seed=seed)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A question, the arms that answer it, and the seeds they share."""

    name: str
    question: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...] = SEEDS
    measures: tuple[str, ...] = ("validation", "loss", "spikes")
    """Columns of the table; the first is the one compared in pairs."""
    baselines: Mapping[str, str] = field(default_factory=dict)
    """Arm → the arm it is compared with; the first arm unless named."""
    curves: tuple[str, ...] = ()
    """What figures are drawn from; see ``results.evidence.curves``."""

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        require(bool(names), f"experiment {self.name} has no arm")
        require(len(set(names)) == len(names), f"{self.name}: two arms share a name")
        require(bool(self.seeds), f"experiment {self.name} has no seed")

    @property
    def tasks(self) -> list[Task]:
        """Return seed by seed, so that a sweep cut short still has whole pairs."""
        return [
            Task(arm=replace(arm, train=replace(arm.train, seed=seed)), seed=seed)
            for seed in self.seeds
            for arm in self.arms
        ]
