"""Bins to bytes and back.

A blob holds planes over bins × sites: lowest, mean, highest, and how many were broken
if any were. The extremes are exact; where they fit 4 bytes a value, the mean is
rounded to 4 as well. At level 0 a blob holds several bins, and their steps first.

Axes, in this file:  N blobs · P planes · K bins of a blob · S sites.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from equipoise.store.packing import NARROW, WIDE, Layout, alike, is_narrow
from equipoise.store.pyramid import Bins, joined, no_bins

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
