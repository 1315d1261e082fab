"""The pyramid in its table: kept by the writer, read by every view.

A bin is written in the transaction of the row that completes it, so the table agrees
with the rows after any crash; what is not yet a whole bin is rebuilt from the rows.
"""

import sqlite3
import sys
from collections.abc import Iterator
from typing import Self

import numpy as np

from equipoise.store.packing import Array, Layout, unpack
from equipoise.store.pyramid import FAN, Bins, decode, encode, joined, merged, row_bins

ROWS_AT_ONCE = 4096


class Tower:
    """The unfinished bins of one series, as its writer holds them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._rows: list[tuple[int, int, Array]] = []
        self._levels: list[list[Bins]] = []

    @classmethod
    def restored(cls, db: sqlite3.Connection, series: int, layout: Layout) -> Self:
        """Take up where the last writer of this series stopped."""
        tower = cls(layout)
        done = last_id(db, series, 1)
        tower._rows = list(zip(*raw(db, series, layout, after=done), strict=True))
        while done:
            level = len(tower._levels) + 1
            done = last_id(db, series, level + 1)
            waiting = stored(db, series, level, len(layout.sites), after=done)
            tower._levels.append([waiting[b : b + 1] for b in range(len(waiting))])
        return tower

    def push(self, key: int, step: int, x_W: Array) -> Iterator[tuple[int, Bins]]:
        """Add a row and yield what it completes: (level, one bin).

        Level 0, a bin per row, is only kept where a site has several heads: elsewhere
        it is the row itself.
        """
        self._rows.append((key, step, x_W))
        if not self._layout.is_flat:
            yield 0, row_bins([key], [step], x_W[None], self._layout)
        if len(self._rows) == FAN:
            ids, steps, rows = zip(*self._rows, strict=True)
            self._rows = []
            yield from self._rise(1, row_bins(ids, steps, np.stack(rows), self._layout))

    def _rise(self, level: int, bins: Bins) -> Iterator[tuple[int, Bins]]:
        whole = merged(bins, self._layout)
        yield level, whole
        if len(self._levels) < level:
            self._levels.append([])
        waiting = self._levels[level - 1]
        waiting.append(whole)
        if len(waiting) == FAN:
            self._levels[level - 1] = []
            yield from self._rise(level + 1, joined(waiting))


def insert(db: sqlite3.Connection, series: int, level: int, bins: Bins) -> None:
    """Store bins of one level."""
    heads = (bins.last_id, bins.first, bins.last, bins.rows)
    for b, head in enumerate(zip(*(column.tolist() for column in heads), strict=True)):
        row = (series, level, *head, encode(bins, b))
        db.execute("INSERT INTO summary VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def last_id(db: sqlite3.Connection, series: int, level: int) -> int:
    """Return the last reading that whole bins of this level cover; 0 if none does."""
    query = "SELECT max(last_id) FROM summary WHERE series = ? AND level = ?"
    return int(db.execute(query, (series, level)).fetchone()[0] or 0)


def stored(
    db: sqlite3.Connection,
    series: int,
    level: int,
    sites: int,
    *,
    after: int = 0,
    until: int = sys.maxsize,
) -> Bins:
    """Return the bins of one level whose last reading is in (after, until]."""
    query = (
        "SELECT last_id, first, last, rows, data FROM summary WHERE series = ? "
        "AND level = ? AND last_id > ? AND last_id <= ? ORDER BY last_id"
    )
    return decode(db.execute(query, (series, level, after, until)).fetchall(), sites)


def raw(
    db: sqlite3.Connection,
    series: int,
    layout: Layout,
    *,
    after: int = 0,
    until: int = sys.maxsize,
    limit: int = -1,
) -> tuple[list[int], list[int], Array]:
    """Return ids, steps and values of the rows in (after, until], as written."""
    query = (
        "SELECT id, step, data FROM reading WHERE series = ? AND id > ? AND id <= ? "
        "ORDER BY id LIMIT ?"
    )
    rows = db.execute(query, (series, after, until, limit)).fetchall()
    ids, steps, blobs = zip(*rows, strict=True) if rows else ((), (), ())
    return list(ids), list(steps), unpack(blobs, layout.width)


def build(db: sqlite3.Connection) -> None:
    """Fill the table from the rows: for a file written before there was a pyramid."""
    for series, line in db.execute("SELECT id, layout FROM series").fetchall():
        layout = Layout.from_json(line)
        tower, after = Tower(layout), 0
        while (block := raw(db, series, layout, after=after, limit=ROWS_AT_ONCE))[0]:
            after = block[0][-1]
            for row in zip(*block, strict=True):
                for level, bins in tower.push(*row):
                    insert(db, series, level, bins)
