"""Which units there are: drawn once from a seed, written down, and never drawn again.

Each part has its own architectures, tasks, optimisers, schedules, forms of the loss and
faults, so that nothing that was looked at in the open is met again behind the lock.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from equipoise_lab.storms.field import architectures, faults, optimisers, tasks
from equipoise_lab.storms.field.architectures import ARCHITECTURES, Part

SEEDS: dict[Part, int] = {"open": 20261119, "locked": 20261120}
COUNTS: dict[Part, tuple[int, int]] = {"open": (30, 90), "locked": (30, 140)}
"""Healthy units that stand alone, and pairs of a fault and its healthy twin."""
WARMUPS = (0.0, 0.02, 0.1, 0.3, 0.8)
BATCHES = (1, 4, 8, 16, 64)
STEPS = (300, 400, 500, 600)
TUNED = 5
"""One healthy unit in this many goes on from weights that were trained before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One run, by everything that decides it."""

    name: str
    part: Part
    architecture: str
    task: str
    vocabulary: int
    length: int
    batch: int
    loss: str
    optimiser: str
    schedule: str
    warmup: float
    """Share of the run."""
    rate: float
    """Peak over the rate at which the optimiser usually trains."""
    clip: float
    """Largest norm of the gradient; 0 clips nothing."""
    steps: int
    trained: int
    """Steps of another seed before the run begins; 0 of an untrained model."""
    seed: int
    fault: str = ""
    onset: int = 0
    severity: float = 0.0
    twin: str = ""
    """The name of the healthy unit that differs in the fault alone."""


def draw(part: Part) -> list[Unit]:
    """Return the units of a part: healthy ones that stand alone, then pairs in turns.

    Architectures and optimisers are dealt, not drawn, so each has its share even of a
    part that was cut short.
    """
    rng = random.Random(SEEDS[part])
    alone, pairs = COUNTS[part]
    deals = [_dealt(names, alone + pairs, rng) for names in _lists(part)]
    waiting = _dealt(faults.names(part), 3 * pairs, rng)
    found = []
    for number, (architecture, recipe, schedule) in enumerate(zip(*deals, strict=True)):
        base = _unit(part, number, architecture, recipe, schedule, rng)
        found.append(base)
        if number < pairs:
            found.append(_with(base, _fitting(waiting, recipe), rng))
    return found


def _fitting(waiting: list[str], recipe: str) -> str:
    """Take the next fault that the optimiser can have."""
    for place, name in enumerate(waiting):
        needs = faults.FAULTS[name].needs
        if not needs or needs in optimisers.RECIPES[recipe].settings:
            return waiting.pop(place)
    raise AssertionError(f"no fault is left for {recipe}")


def _lists(part: Part) -> tuple[list[str], list[str], list[str]]:
    return (
        architectures.names(part),
        optimisers.names(part),
        optimisers.schedules(part),
    )


def _dealt(names: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Return ``count`` names: each once in random order before any comes again."""
    found: list[str] = []
    while len(found) < count:
        found += rng.sample(list(names), len(names))
    return found[:count]


def _unit(
    part: Part,
    number: int,
    architecture: str,
    recipe: str,
    schedule: str,
    rng: random.Random,
) -> Unit:
    kind = ARCHITECTURES[architecture].kind
    task = rng.choice(tasks.names(kind, part))
    vocabulary = rng.choice(tasks.TASKS[task].vocabularies)
    forms = [form for form, (its, *_) in tasks.LOSSES.items() if its == part]
    large = vocabulary > 5000
    return Unit(
        name=f"{part}-{number:03d}",
        part=part,
        architecture=architecture,
        task=task,
        vocabulary=vocabulary,
        length=16 if large else rng.choice((16, 32, 48)),
        batch=rng.choice((1, 2)) if large else rng.choice(BATCHES),
        # Most runs have a plain loss, so most units do.
        loss=rng.choice(forms) if part == "locked" or rng.random() < 0.4 else "plain",
        optimiser=recipe,
        schedule=schedule,
        warmup=rng.choice(WARMUPS),
        rate=rng.choice((0.3, 1.0)),
        clip=rng.choice((0.0, 1.0)),
        steps=rng.choice(STEPS),
        trained=200 if number % TUNED == TUNED - 1 else 0,
        seed=number + 1,
    )


def _with(base: Unit, fault: str, rng: random.Random) -> Unit:
    """Return the unit with a fault that starts between a fifth and a half of it."""
    start = int(base.steps * rng.uniform(0.2, 0.5))
    return replace(
        base,
        name=f"{base.name}-fault",
        fault=fault,
        onset=0 if faults.FAULTS[fault].at_start else start,
        severity=round(rng.random(), 3),
        twin=base.name,
    )


def path(part: Part) -> Path:
    return Path(__file__).parent / f"{part}.json"


def units(part: Part) -> list[Unit]:
    """Return the units as they were written down."""
    given = json.loads(path(part).read_text(encoding="utf-8"))
    return [Unit(**one) for one in given["units"]]


def written(part: Part) -> str:
    """Return the manifest of a part as a file holds it."""
    lines = ",\n".join("  " + json.dumps(asdict(unit)) for unit in draw(part))
    return f'{{"part": "{part}", "seed": {SEEDS[part]}, "units": [\n{lines}\n]}}\n'
