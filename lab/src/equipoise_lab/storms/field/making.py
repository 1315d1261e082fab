"""Makes the units of a part that are not recorded yet; one at a time, resumable."""

import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from equipoise_lab.storms.field.manifest import Unit
from equipoise_lab.storms.field.recording import place, read, write
from equipoise_lab.storms.field.training import run

Report = Callable[[str], None]


def missing(units: Sequence[Unit], folder: Path) -> list[Unit]:
    """Return units without a record, and those the instrument refused to watch."""
    return [unit for unit in units if not is_recorded(place(folder, unit))]


def is_recorded(path: Path) -> bool:
    return path.exists() and not read(path).refused


def make(units: Sequence[Unit], folder: Path, report: Report) -> None:
    """Train and record what is missing; what the instrument says is not shown."""
    torch.set_num_threads(1)
    log = logging.getLogger("equipoise")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        _record(missing(units, folder), folder, report)
    finally:
        log.setLevel(before)


def _record(units: Sequence[Unit], folder: Path, report: Report) -> None:
    for unit in units:
        random.seed(unit.seed)
        np.random.seed(unit.seed)
        recorded = run(unit)
        write(place(folder, unit), recorded)
        kind = f"{unit.architecture}, {unit.optimiser}, {unit.fault or 'healthy'}"
        became = recorded.refused or "recorded"
        report(f"{unit.name} ({kind}): {became}, {recorded.seconds:.1f} s")
