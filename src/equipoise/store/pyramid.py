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

from equipoise.store.packing import NARROW, WIDE, Array, Layout, is_narrow

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

    def __getitem__(self, which: slice | NDArray[np.bool_]) -> "Bins":
        return Bins(*(getattr(self, f.name)[which] for f in fields(self)))


def joined(parts: Sequence[Bins]) -> Bins:
    """Return the bins of all parts, in order."""
    columns = ([getattr(part, f.name) for part in parts] for f in fields(Bins))
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
    planes = (np.where(some_RS, plane, np.nan) for plane in (low_RS, mean_RS, high_RS))
    return *planes, np.array(layout.widths) - n_RS


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


def encode(bins: Bins, b: int) -> bytes:
    """Return bin ``b``: three planes over sites, a fourth if something was broken.

    The extremes are exact; where they fit 4 bytes a value, the mean is rounded to 4.
    """
    planes = [bins.low[b], bins.mean[b], bins.high[b]]
    if bins.broken[b].any():
        planes.append(bins.broken[b])
    exact = is_narrow(planes[0]) and is_narrow(planes[2])
    return np.concatenate(planes).astype(NARROW if exact else WIDE).tobytes()


def decode(rows: Sequence[tuple[int, int, int, int, bytes]], sites: int) -> Bins:
    """Return bins from rows of (last_id, first, last, rows, data)."""
    planes = np.zeros((4, len(rows), sites))
    for b, row in enumerate(rows):
        dtype = NARROW if len(row[4]) in (12 * sites, 16 * sites) else WIDE
        x = np.frombuffer(row[4], dtype).reshape(-1, sites) if sites else planes[:, b]
        planes[: len(x), b] = x
    heads = np.array([row[:4] for row in rows], np.int64).reshape(-1, 4).T
    return Bins(*heads, *planes)
