"""The pyramid in its table.

A bin is written in the transaction of the row that completes it, so the table agrees
with the rows after any crash; what is not yet a whole bin is rebuilt from the rows.
"""

import sqlite3
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from equipoise.store.blocks import decoded, encoded
from equipoise.store.packing import Array, Layout, unpack
from equipoise.store.pyramid import FAN, Bins, row_bins
from equipoise.store.tower import Risen, Tower

ROWS_AT_ONCE = 4096


def insert(
    db: sqlite3.Connection, series: Sequence[int], risen: Iterable[Risen]
) -> None:
    """Store what has been completed; ``series`` names the series of each slot."""
    for level, slots, bins in risen:
        size = FAN if level == 0 else 1
        parts = (bins[b * size : (b + 1) * size] for b in range(len(slots)))
        rows = [
            (series[slot], level, *encoded(part, level))
            for slot, part in zip(slots.tolist(), parts, strict=True)
        ]
        db.executemany("INSERT INTO summary VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


def last_id(db: sqlite3.Connection, series: int, level: int) -> int:
    """Return the last reading that whole bins of this level cover; 0 if none does."""
    query = "SELECT max(last_id) FROM summary WHERE series = ? AND level = ?"
    return int(db.execute(query, (series, level)).fetchone()[0] or 0)


def stored(
    db: sqlite3.Connection,
    series: int,
    level: int,
    layout: Layout,
    *,
    after: int = 0,
    until: int = sys.maxsize,
) -> Bins:
    """Return the bins of one level whose last reading is in (after, until]."""
    query = (
        "SELECT last_id, first, last, rows, data FROM summary WHERE series = ? "
        "AND level = ? AND last_id > ? AND last_id <= ? ORDER BY last_id"
    )
    rows = db.execute(query, (series, level, after, until)).fetchall()
    return decoded(rows, level, layout)


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


def restore(
    db: sqlite3.Connection, series: int, layout: Layout, *, tower: Tower, slot: int
) -> None:
    """Fill a slot with what the last writer of the series left unfinished."""
    level, done = 0, last_id(db, series, 1)
    waiting = row_bins(*raw(db, series, layout, after=done), layout)
    while True:
        for b in range(len(waiting)):
            for _ in tower.push(np.array([slot]), waiting[b : b + 1], level=level):
                raise AssertionError(f"series {series}: a bin of level {level} is lost")
        if not done:
            return
        level, done = level + 1, last_id(db, series, level + 2)
        waiting = stored(db, series, level, layout, after=done)


def build(db: sqlite3.Connection) -> None:
    """Fill the table from the rows: for a file written before there was a pyramid."""
    for series, line in db.execute("SELECT id, layout FROM series").fetchall():
        layout = Layout.from_json(line)
        tower, after = Tower(layout), 0
        while (block := raw(db, series, layout, after=after, limit=ROWS_AT_ONCE))[0]:
            after = block[0][-1]
            bins = row_bins(*block, layout)
            for b in range(len(bins)):
                insert(db, [series], tower.push(np.array([0]), bins[b : b + 1]))
