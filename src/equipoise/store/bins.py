"""Bins: lowest, mean and highest value per site over stretches of rows, and as bytes.

NaN and Inf are left out of the three numbers and counted beside them: one broken step
must neither vanish nor blank the curve.

As bytes, a bin is planes over bins × sites: lowest, mean, highest, and how many values
were broken if any were. The extremes are exact; where they fit 4 bytes a value, the
mean is rounded to 4 as well. At level 0 a blob holds several bins, and their steps
first.

Axes, in this file:  R row · W value of a row · B bin · S site · K bins of a blob, or to
merge · N blobs · P planes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from equipoise.store.packing import NARROW, WIDE, Array, Layout, alike, is_narrow

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
    """Return the bins of all parts, in order; a part that is alone is not copied."""
    some = [part for part in parts if len(part)]
    if len(some) < 2:
        return some[0] if some else parts[0]
    columns = ([getattr(part, name) for part in some] for name in COLUMNS)
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


STEP = np.dtype("<i8")

Row = tuple[int, int, int, int, bytes]
"""last_id, first, last, rows, data."""


def encoded(bins: Bins, level: int) -> Row:
    """Return some bins of one series as a row of the table: one bin, or a block."""
    x_PKS = np.stack([bins.low, bins.mean, bins.high, bins.broken])
    exact = is_narrow(x_PKS[::2])
    planes = 4 if x_PKS[3].any() else 3
    data = x_PKS[:planes].astype(NARROW if exact else WIDE).tobytes()
    steps = bins.first.astype(STEP).tobytes() if level == 0 else b""
    first, last = int(bins.first.min()), int(bins.last.max())
    return int(bins.last_id[-1]), first, last, int(bins.rows.sum()), steps + data


def decoded(rows: Sequence[Row], level: int, layout: Layout) -> Bins:
    """Return the bins of rows of one level, in order."""
    runs = (rows[start:stop] for start, stop in alike([row[4] for row in rows]))
    return joined([no_bins(layout), *(_run(run, level, layout) for run in runs)])


def _run(rows: Sequence[Row], level: int, layout: Layout) -> Bins:
    """Return the bins of rows whose blobs have one length, in one conversion."""
    head = np.array([row[:4] for row in rows], np.int64)
    bins = int(head[0, 3]) if level == 0 else 1
    prefix = bins * STEP.itemsize if level == 0 else 0
    x_PNKS = _planes([row[4][prefix:] for row in rows], bins, len(layout.sites))
    planes = x_PNKS.reshape(4, len(rows) * bins, -1)
    last_id = np.repeat(head[:, 0], bins)
    if level:
        return Bins(last_id, head[:, 1], head[:, 2], head[:, 3], *planes)
    steps = np.frombuffer(b"".join(row[4][:prefix] for row in rows), STEP)
    return Bins(last_id, steps, steps, np.ones_like(steps), *planes)


def _planes(blobs: Sequence[bytes], bins: int, sites: int) -> NDArray[np.float64]:
    count = bins * sites
    size = len(blobs[0])
    # 3 or 4 planes of 4 or 8 bytes: 12, 16, 24 or 32 bytes a value, never ambiguous.
    dtype = NARROW if size <= 16 * count else WIDE
    planes = size // (dtype.itemsize * count) if count else 3
    x_NPKS = np.frombuffer(b"".join(blobs), dtype).reshape(-1, planes, bins, sites)
    full = np.zeros((4, len(blobs), bins, sites))
    full[:planes] = x_NPKS.swapaxes(0, 1)
    return full
