"""Curves over training, read from the pyramid of one run."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from equipoise.store import Run, Summary

Numbers = list[float | None]
"""None where there is no finite number: a gap in the curve, never a zero."""

POINTS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a figure."""

    run: str
    label: str
    x: list[int]
    y: Numbers
    low: Numbers = field(default_factory=list)
    """Empty, or the lower edge of a band around the line."""
    high: Numbers = field(default_factory=list)
    faint: bool = False
    """Drawn dotted, as the companion of another line."""
    names: list[str] = field(default_factory=list)
    """Empty, or what each point is called."""
    points: bool = False
    """Marks without a line between them."""


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """All sites of a quantity together, stretch by stretch."""

    step: NDArray[np.int64]
    low: NDArray[np.float64]
    mean: NDArray[np.float64]
    high: NDArray[np.float64]
    broken: NDArray[np.int64]


def pooled(run: Run, quantity: str, site: str | None = None) -> Pooled | None:
    """Return the quantity over sites and heads; None if the run does not have it."""
    if quantity not in run.quantities:
        return None
    parts = list(run.summary(quantity, site, points=POINTS).values())
    return _pooled(parts) if any(len(part.last) for part in parts) else None


def _pooled(parts: list[Summary]) -> Pooled:
    step, where = np.unique(
        np.concatenate([part.last for part in parts]), return_inverse=True
    )
    low, high = np.full(len(step), np.nan), np.full(len(step), np.nan)
    np.fmin.at(low, where, np.concatenate([part.low for part in parts]))
    np.fmax.at(high, where, np.concatenate([part.high for part in parts]))
    mean = np.concatenate([part.mean for part in parts])
    known = np.isfinite(mean)
    total = np.bincount(where[known], mean[known], len(step))
    count = np.bincount(where[known], minlength=len(step))
    with np.errstate(invalid="ignore"):
        average = total / count  # 0/0 is NaN: a gap
    broken = np.bincount(
        where, np.concatenate([part.broken for part in parts]), len(step)
    )
    return Pooled(step, low, average, high, broken.astype(np.int64))


def first_break(found: Pooled | None) -> int | None:
    """Return the first step at which a value was NaN or Inf."""
    if found is None or not found.broken.any():
        return None
    return int(found.step[np.flatnonzero(found.broken)[0]])


def numbers(values: Iterable[float]) -> Numbers:
    """Return six significant digits of each, and None for what cannot be drawn."""
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values]
