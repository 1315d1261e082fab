"""Labels of the benchmark's runs: outcome and onset, by the loss alone.

*failed*: not finite, or more than 5 % above the matched healthy run on fixed validation
batches. *survived*: at most 2 % above. What lies between is left out, and counted.
*Onset*: the first step from which the smoothed training loss stays more than 2 % above
the matched run's. No forecaster is asked.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import InputError
from equipoise_lab.running.experiment import RESULT
from equipoise_lab.storms.plan import Storm, reference_of

Outcome = Literal["failed", "survived", "between"]
Curve = NDArray[np.float64]

FAILED, SURVIVED = 1.05, 1.02
SMOOTH = 16
"""Steps of the trailing mean."""
MARGIN = 1.02
"""The band reaches this far above the matched run."""
EARLIEST = 32
"""Steps after start or injection before which a forecast is not asked for."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """What became of a run."""

    storm: Storm
    folder: Path
    outcome: Outcome
    validation: float
    healthy: float
    """Validation loss of the matched run; its own for controls."""
    onset: int | None = None
    """None for a run that did not fail, or whose training loss never left the band."""
    injected: int = 0
    layer: int | None = None
    """The block at fault, where it is one."""
    steps: int = 0

    @property
    def is_stable(self) -> bool:
        """Whether an alarm in this run is false."""
        return self.outcome == "survived"

    @property
    def is_forecastable(self) -> bool:
        """Whether it fails late enough to be foreseen."""
        if self.outcome != "failed" or self.onset is None:
            return False
        return self.onset - self.injected >= EARLIEST


def outcome(validation: float, healthy: float) -> Outcome:
    """Return what a validation loss means beside the healthy one.

    >>> outcome(2.2, 2.0), outcome(2.02, 2.0), outcome(2.06, 2.0), outcome(np.inf, 2.0)
    ('failed', 'survived', 'between', 'failed')
    """
    if not np.isfinite(validation) or validation > FAILED * healthy:
        return "failed"
    return "survived" if validation <= SURVIVED * healthy else "between"


def smoothed(losses: Sequence[float]) -> Curve:
    """Return the trailing mean over sixteen steps; infinite from a NaN on.

    >>> smoothed([1.0, 3.0]).tolist()
    [1.0, 2.0]
    """
    x = np.where(np.isfinite(losses), losses, np.inf).astype(float)
    padded = np.concatenate([np.zeros(1), np.cumsum(x)])
    at = np.arange(1, len(x) + 1)
    first = np.maximum(0, at - SMOOTH)
    with np.errstate(invalid="ignore"):  # inf - inf: lost anyway
        mean: Curve = (padded[at] - padded[first]) / (at - first)
    return np.where(np.isnan(mean), np.inf, mean)


def onset(losses: Sequence[float], healthy: Sequence[float]) -> int | None:
    """Return the first step from which the loss stays above the matched run's band.

    The matched run has the same seed, so it meets the same batches: what is hard for
    both cancels. A band over seeds would be as wide as batches differ.

    >>> onset([2.0] * 40 + [9.0] * 20, [2.0] * 60)
    40
    >>> onset([2.0] * 60, [2.0] * 60) is None
    True
    """
    length = min(len(losses), len(healthy))
    band = MARGIN * smoothed(healthy)[:length]
    inside = np.flatnonzero(smoothed(losses)[:length] <= band)
    first = int(inside[-1]) + 1 if len(inside) else 0
    return first if first < length else None


def labels(root: Path) -> list[Label]:
    """Return the label of every finished run whose matched run is finished too."""
    given = [json.loads(p.read_text()) for p in sorted(root.glob(f"*/*/{RESULT}"))]
    records = {Storm(**record["storm"]): record for record in given}
    if not records:
        raise InputError(
            f"no finished run in {root}; make some first: equipoise lab run storms"
        )
    found = (_label(storm, record, records, root) for storm, record in records.items())
    return [label for label in found if label is not None]


def _label(
    storm: Storm,
    record: Mapping[str, Any],
    records: Mapping[Storm, Mapping[str, Any]],
    root: Path,
) -> Label | None:
    plain = Label(
        storm=storm,
        folder=root / storm.folder,
        outcome="survived",
        validation=float(record["validation"]),
        healthy=float(record["validation"]),
        injected=int(record["injected"]),
        layer=record["layer"],
        steps=len(record["losses"]),
    )
    reference = reference_of(storm)
    if storm.role != "fault":
        return plain
    if reference not in records:
        return None
    healthy = float(records[reference]["validation"])
    became = outcome(plain.validation, healthy)
    start = None
    if became == "failed":
        start = onset(record["losses"], records[reference]["losses"])
    return replace(plain, outcome=became, healthy=healthy, onset=start)


def counts(found: Sequence[Label]) -> dict[str, dict[str, int]]:
    """Return per family how many failed, survived, lie between, and fail too early."""
    table: dict[str, dict[str, int]] = {}
    for label in found:
        storm = label.storm
        name = storm.family if storm.role == "fault" else storm.role
        row = table.setdefault(
            f"{storm.tier}: {name}",
            dict.fromkeys(("failed", "survived", "between", "too early"), 0),
        )
        row[label.outcome] += 1
        if label.outcome == "failed" and not label.is_forecastable:
            row["too early"] += 1
    return table


def sensitivity(found: Sequence[Label]) -> float:
    """Return the mean excess loss over the learning-rate family, capped at ln 256.

    Wortsman et al.'s learning-rate sensitivity (arXiv 2309.14322), in nats.
    """
    excess = [
        min(label.validation, float(np.log(256))) - label.healthy
        for label in found
        if label.storm.role == "fault" and label.storm.family == "learning rate"
    ]
    return float(np.mean(excess)) if excess else float("nan")
