"""Lowest, mean and highest value per site over heads, then over 16, 256, … rows.

A view of 10⁵ steps reads a few hundred bins instead of 10⁵ rows. NaN and Inf are left
out of the three numbers and counted beside them: one broken step must neither vanish
nor blank the whole curve.

Axes, in this file:  R row · W value of a row · B bin · S site · K bins to merge.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from equipoise.store.packing import Array, Layout

Integers = NDArray[np.int64]
FAN = 16


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Consecutive rows of a series, summarised; bin b spans rows up to last_id[b]."""

    last_id: Integers
    first: Integers
    """Lowest step in the bin."""
    last: Integers
    """Highest step in the bin."""
    rows: Integers
    low: Array
    """Over the finite values; NaN where there are none. Shape (B, S), like the next."""
    mean: Array
    high: Array
    broken: Array
    """How many values were NaN or Inf."""

    def __len__(self) -> int:
        return len(self.last_id)

    def __getitem__(self, which: slice | NDArray[np.bool_] | Integers) -> "Bins":
        return Bins(*[getattr(self, name)[which] for name in COLUMNS])

    def put(self, where: Integers, bins: "Bins") -> None:
        """Overwrite some of the bins."""
        for name in COLUMNS:
            getattr(self, name)[where] = getattr(bins, name)


COLUMNS = tuple(field.name for field in fields(Bins))


def no_bins(layout: Layout, count: int = 0) -> Bins:
    """Return room for so many bins."""
    heads = [np.zeros(count, np.int64) for _ in range(4)]
    planes = [np.zeros((count, len(layout.sites))) for _ in range(4)]
    return Bins(heads[0], heads[1], heads[2], heads[3], *planes)


def joined(parts: Sequence[Bins]) -> Bins:
    """Return the bins of all parts, in order."""
    columns = ([getattr(part, name) for part in parts] for name in COLUMNS)
    return Bins(*(np.concatenate(column) for column in columns))


def row_bins(
    ids: Sequence[int], steps: Sequence[int], x_RW: Array, layout: Layout
) -> Bins:
    """Return one bin per row: lowest, mean and highest over the heads of each site."""
    step_R = np.array(steps, np.int64)
    id_R, one_R = np.array(ids, np.int64), np.ones(len(step_R), np.int64)
    return Bins(id_R, step_R, step_R, one_R, *_over_heads(x_RW, layout))


def _over_heads(x_RW: Array, layout: Layout) -> tuple[Array, Array, Array, Array]:
    finite_RW = np.isfinite(x_RW)
    if layout.is_flat:
        x_RS = np.where(finite_RW, x_RW, np.nan)
        return x_RS, x_RS, x_RS, (~finite_RW).astype(float)
    starts = layout.starts
    n_RS = np.add.reduceat(finite_RW.astype(float), starts, axis=1)
    low_RS = np.minimum.reduceat(np.where(finite_RW, x_RW, np.inf), starts, axis=1)
    high_RS = np.maximum.reduceat(np.where(finite_RW, x_RW, -np.inf), starts, axis=1)
    # Divide, then add: the sum of finite values need not be finite.
    n_RW = np.repeat(np.maximum(n_RS, 1), layout.widths, axis=1)
    mean_RS = np.add.reduceat(np.where(finite_RW, x_RW, 0) / n_RW, starts, axis=1)
    mean_RS = np.clip(mean_RS, low_RS, high_RS)  # rounding must not leave the range
    some_RS = n_RS > 0
    low_RS, mean_RS, high_RS = (
        np.where(some_RS, plane, np.nan) for plane in (low_RS, mean_RS, high_RS)
    )
    return low_RS, mean_RS, high_RS, np.array(layout.widths) - n_RS


def merged(bins: Bins, layout: Layout, *, fan: int = FAN) -> Bins:
    """Return each group of ``fan`` bins as one; the number of bins is a multiple."""
    shape = (len(bins) // fan, fan, -1)
    low_BKS, mean_BKS, high_BKS, broken_BKS = (
        plane.reshape(shape) for plane in (bins.low, bins.mean, bins.high, bins.broken)
    )
    n_BKS = np.outer(bins.rows, layout.widths).reshape(shape) - broken_BKS
    share_BKS = n_BKS / np.maximum(n_BKS.sum(axis=1, keepdims=True), 1)
    mean_BS = np.where(n_BKS > 0, mean_BKS * share_BKS, 0).sum(axis=1)
    low_BS, high_BS = np.fmin.reduce(low_BKS, axis=1), np.fmax.reduce(high_BKS, axis=1)
    return Bins(
        bins.last_id.reshape(shape[:2])[:, -1],
        bins.first.reshape(shape[:2]).min(axis=1),
        bins.last.reshape(shape[:2]).max(axis=1),
        bins.rows.reshape(shape[:2]).sum(axis=1),
        low_BS,
        np.clip(mean_BS, low_BS, high_BS),
        high_BS,
        broken_BKS.sum(axis=1),
    )
