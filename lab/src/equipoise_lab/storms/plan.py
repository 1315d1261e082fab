"""The plan of the benchmark: which runs are made, and how they are split.

Of every family half of the runs are mild and half severe, drawn from one range of one
setting, so that survivors and failures are configured alike. Which of them fail is
decided by the loss (``labels``), not here.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from equipoise_lab.running.experiment import RESULT, short_hash
from equipoise_lab.running.workers import Job

Tier = Literal["small", "deep"]
Role = Literal["fault", "control", "reference"]

FAMILIES = (
    "learning rate",
    "ramp",
    "no warm-up",
    "post-LN",
    "logit growth",
    "precision",
    "corrupted data",
    "adam",
    "router",
    "residual",
    "init",
)
EXOGENOUS = ("corrupted data",)
"""Families whose cause comes from outside: nothing in the model can announce it."""
DEEP_FAMILIES = ("learning rate", "ramp", "post-LN", "logit growth")
CONTROLS = (
    "spiky data",
    "learning-rate step",
    "length change",
    "restart",
    "curriculum",
    "weight averaging",
    "small batch",
    "frozen layers",
    "adapters",
    "fine-tuning",
)
HELD_OUT_FAMILIES = ("no warm-up", "residual")
"""No threshold may be tuned on these."""
UNSEEN = 12
"""The first seed that was not looked at before everything was fixed."""
MILD, SEVERE = (0.0, 0.4), (0.6, 1.0)


@dataclass(frozen=True, kw_only=True)
class Storm(Job):
    """One run of the benchmark: a job of the lab's runner."""

    role: Role
    family: str
    """Of faults or of controls; of a reference, the family it is matched with."""
    severity: float
    """0 is the mildest of a family and 1 the worst; 0 for controls and references."""
    seed: int
    tier: Tier = "small"
    steps: int = 300

    @property
    def key(self) -> str:
        return short_hash(json.dumps(asdict(self), sort_keys=True))

    @property
    def name(self) -> str:
        return f"{self.tier} {self.role} {self.family} {self.seed}"

    @property
    def folder(self) -> Path:
        kind = f"{self.tier}-{self.role}-{self.family.replace(' ', '-')}"
        return Path(kind) / f"seed-{self.seed}-{self.key}"

    @property
    def result(self) -> Path:
        return self.folder / RESULT


@dataclass(frozen=True, kw_only=True)
class Size:
    """How many runs, and how long."""

    pairs: int = 8
    """Mild and severe runs of each family, and controls of each kind."""
    deep_pairs: int = 4
    steps: int = 300
    control_steps: int = 500


NORMAL, FULL = Size(), Size(pairs=24, deep_pairs=12)
QUICK = Size(pairs=1, deep_pairs=0, steps=40, control_steps=40)


def severity(family: str, seed: int, span: tuple[float, float]) -> float:
    """Return where in its span a run lies: spread by seed, the same everywhere."""
    draw = random.Random(f"{family} {seed} {span}").random()
    return round(span[0] + (span[1] - span[0]) * draw, 4)


TUNED, SCORED = 1, 9
"""The first seed to tune on, and the first that nothing may be tuned on."""


def seeds_of(count: int) -> list[int]:
    """Return the seeds of so many runs: half to tune on, half to score on.

    Seeds 5 to 8 were looked at in an earlier scoring; only a larger plan has them.

    >>> seeds_of(8), seeds_of(1)
    ([1, 2, 3, 4, 9, 10, 11, 12], [1])
    """
    tuned = min(SCORED - TUNED, (count + 1) // 2)
    return [*range(TUNED, TUNED + tuned), *range(SCORED, SCORED + count - tuned)]


def plan(size: Size = NORMAL) -> list[Storm]:
    """Return every run, seed by seed, of both halves in turn; deep ones among them.

    Cut short, all families have as many, to tune on and to score on.
    """
    seeds = seeds_of(size.pairs)
    half = (len(seeds) + 1) // 2
    turns = [s for k in range(half) for s in seeds[k::half]]
    deep = list(range(SCORED, SCORED + size.deep_pairs))
    tasks: list[Storm] = []
    for turn, seed in enumerate(turns):
        tasks += _of_seed(seed, size)
        if turn >= half and deep:
            tasks += _faults(DEEP_FAMILIES, deep.pop(0), "deep", size.steps)
    for seed in deep:  # those that had no turn yet
        tasks += _faults(DEEP_FAMILIES, seed, "deep", size.steps)
    return list(dict.fromkeys(tasks))


def _of_seed(seed: int, size: Size) -> Iterable[Storm]:
    for kind in CONTROLS if seed in seeds_of(size.pairs) else ():
        yield Storm(
            role="control",
            family=kind,
            severity=0.0,
            seed=seed,
            steps=size.control_steps,
        )
    if seed in seeds_of(size.pairs):
        yield from _faults(FAMILIES, seed, "small", size.steps)


def _faults(
    families: Sequence[str], seed: int, tier: Tier, steps: int
) -> Iterable[Storm]:
    for family in families:
        for span in (MILD, SEVERE):
            storm = Storm(
                role="fault",
                family=family,
                severity=severity(family, seed, span),
                seed=seed,
                tier=tier,
                steps=steps,
            )
            yield reference_of(storm)
            yield storm


MATCHED = {"router": "router", "post-LN": "post-LN"}
"""Families whose healthy run has a shape of its own: experts, or more layers."""


def reference_of(storm: Storm) -> Storm:
    """Return the healthy run a fault is compared with: same data, seed and length."""
    return Storm(
        role="reference",
        family=MATCHED.get(storm.family, "plain"),
        severity=0.0,
        seed=storm.seed,
        tier=storm.tier,
        steps=storm.steps,
    )


def folds(storms: Sequence[Storm], by: Literal["seed", "family"]) -> list[list[Storm]]:
    """Return the runs in groups that share a seed, or a family.

    A forecaster that is scored on a group may be tuned on all the others.
    """
    groups: dict[object, list[Storm]] = {}
    for storm in storms:
        groups.setdefault(getattr(storm, by), []).append(storm)
    return list(groups.values())
