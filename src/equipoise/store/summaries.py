"""Summaries of a series in the run file: one bin per 16, 256, … readings.

A view of 10⁵ steps then reads a few hundred bins instead of 10⁵ rows. A bin is written
in the transaction of the row that completes it, so the table agrees with the rows after
any crash; unfinished bins are rebuilt from the rows. The unfinished bins of all series
that share a layout advance together (``OpenBins``): 40 quantities of a sampled step
cost a handful of array operations, not 40 times a handful.
"""

import sqlite3
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from equipoise.store.bins import (
    FAN,
    Bins,
    Integers,
    Row,
    decoded,
    encoded,
    joined,
    merged,
    no_bins,
    row_bins,
)
from equipoise.store.checksums import Damage, series_end, with_checksum
from equipoise.store.packing import Array, Layout, unpack

Completed = tuple[int, Integers, Bins]
"""Level, the slots that completed something, and their bins, slot after slot."""


class _Level:
    """Up to FAN bins waiting in each slot."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._fill = np.zeros(0, np.int64)
        self._bins = no_bins(layout)

    def add(self, slots: Integers, bins: Bins) -> Integers:
        """Add one bin to each slot; return those that are full now."""
        self._reserve(int(slots.max()) + 1)
        fill = self._fill[slots]
        self._bins.put(slots * FAN + fill, bins)
        self._fill[slots] = fill + 1
        full: Integers = slots[fill == FAN - 1]
        return full

    def pop(self, full: Integers) -> Bins:
        """Return the bins of some full slots, and empty them."""
        self._fill[full] = 0
        return self._bins[np.add.outer(full * FAN, np.arange(FAN)).ravel()]

    def _reserve(self, slots: int) -> None:
        missing = slots - len(self._fill)
        if missing > 0:
            self._fill = np.append(self._fill, np.zeros(missing, np.int64))
            self._bins = joined([self._bins, no_bins(self._layout, missing * FAN)])


class OpenBins:
    """The unfinished bins of every level, one slot per series."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._levels: list[_Level] = []

    def push(
        self, slots: Integers, bins: Bins, *, level: int = 0
    ) -> Iterator[Completed]:
        """Add one bin to each of some slots, all different; yield what is complete.

        Level 0, a bin per row, is only yielded where a site has several heads:
        elsewhere it is the row itself.
        """
        while len(self._levels) <= level:
            self._levels.append(_Level(self._layout))
        full = self._levels[level].add(slots, bins)
        if not len(full):
            return
        ready = self._levels[level].pop(full)
        if level == 0 and not self._layout.is_flat:
            yield 0, full, ready
        completed = merged(ready, self._layout)
        yield level + 1, full, completed
        yield from self.push(full, completed, level=level + 1)


ROWS_AT_ONCE = 4096


class SummaryRows(NamedTuple):
    """Rows of a series, those that are as they were written."""

    ids: list[int]
    steps: list[int]
    values: Array
    end: int
    """The last one that was looked at, damaged or not; 0 if there was none."""


class Ends:
    """The last bin of each series and level: the next one names it."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], int] = {}

    def load(self, db: sqlite3.Connection, series: int) -> None:
        """Learn the bins that an earlier writer stored."""
        query = (
            "SELECT level, max(last_id) FROM summary WHERE series = ? GROUP BY level"
        )
        for level, last in db.execute(query, (series,)):
            self._ends[series, level] = last

    def replace(self, series: int, level: int, last: int) -> int:
        """Return the last bin so far, and take a new one for it."""
        before = self._ends.get((series, level), 0)
        self._ends[series, level] = last
        return before


def insert(
    db: sqlite3.Connection,
    series: Sequence[int],
    completed: Iterable[Completed],
    *,
    ends: Ends,
) -> None:
    """Store what has been completed; ``series`` names the series of each slot."""
    for level, slots, bins in completed:
        size = FAN if level == 0 else 1
        parts = (bins[b * size : (b + 1) * size] for b in range(len(slots)))
        rows = [
            _stored_row(series[slot], level, encoded(part, level), ends)
            for slot, part in zip(slots.tolist(), parts, strict=True)
        ]
        db.executemany(
            "REPLACE INTO summary (series, level, last_id, prev, first, last, rows, "
            "data, sum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )


def _stored_row(series: int, level: int, row: Row, ends: Ends) -> tuple[Any, ...]:
    last, *rest = row
    return with_checksum(series, level, last, ends.replace(series, level, last), *rest)


def last_id(db: sqlite3.Connection, series: int, level: int) -> int:
    """Return the last reading in a complete bin of this level; 0 if none is."""
    query = "SELECT max(last_id) FROM summary WHERE series = ? AND level = ?"
    return int(db.execute(query, (series, level)).fetchone()[0] or 0)


def stored(
    db: sqlite3.Connection,
    series: int,
    level: int,
    layout: Layout,
    *,
    damage: Damage,
    after: int = 0,
    until: int = sys.maxsize,
) -> Bins:
    """Return the bins of one level whose last reading is in (after, until]."""
    query = (
        "SELECT series, level, last_id, prev, first, last, rows, data, sum "
        "FROM summary WHERE series = ? AND level = ? AND last_id > ? AND last_id <= ? "
        "ORDER BY last_id"
    )
    found = db.execute(query, (series, level, after, until)).fetchall()
    what = damage.summaries(series)
    rows = damage.sound(found, what, key=2)
    damage.chain([(row[3], row[2]) for row in rows], what, after=after)
    return decoded([(row[2], *row[4:]) for row in rows], level, layout)


def raw(
    db: sqlite3.Connection,
    series: int,
    layout: Layout,
    *,
    damage: Damage,
    after: int = 0,
    until: int = sys.maxsize,
    limit: int = -1,
) -> SummaryRows:
    """Return the rows in (after, until], as written."""
    query = (
        "SELECT id, series, step, prev, data, sum FROM reading "
        "WHERE series = ? AND id > ? AND id <= ? ORDER BY id LIMIT ?"
    )
    found = db.execute(query, (series, after, until, limit)).fetchall()
    what = damage.readings(series)
    rows = damage.sound(found, what)
    links = [(row[3], row[0]) for row in rows]
    if len(found) == limit:
        damage.chain(links, what, after=after)
    else:
        end = until if until < sys.maxsize else series_end(db, series, damage)
        damage.chain(links, what, after=after, until=end)
    values = unpack([row[4] for row in rows], layout.width)
    last = found[-1][0] if found else 0
    return SummaryRows([row[0] for row in rows], [row[2] for row in rows], values, last)


def restore(
    db: sqlite3.Connection,
    series: int,
    layout: Layout,
    *,
    bins: OpenBins,
    slot: int,
    ends: Ends,
    damage: Damage,
) -> None:
    """Fill a slot with what the last writer of the series left unfinished.

    A bin that was lost is stored again.
    """
    ends.load(db, series)
    names = [series] * (slot + 1)
    level, done = 0, last_id(db, series, 1)
    rows = raw(db, series, layout, damage=damage, after=done)
    waiting = row_bins(*rows[:3], layout)
    while True:
        for b in range(len(waiting)):
            one = np.array([slot]), waiting[b : b + 1]
            insert(db, names, bins.push(*one, level=level), ends=ends)
        if not done:
            return
        level, done = level + 1, last_id(db, series, level + 2)
        waiting = stored(db, series, level, layout, damage=damage, after=done)


def build(db: sqlite3.Connection) -> None:
    """Fill the table from the rows: for a file written before there were summaries."""
    ends, damage = Ends(), Damage(Path(), checked=False)
    for series, line in db.execute("SELECT id, layout FROM series").fetchall():
        layout = Layout.from_json(line)
        open_bins, after = OpenBins(layout), 0
        while (block := _block(db, series, layout, damage, after)).end:
            after = block.end
            bins = row_bins(*block[:3], layout)
            for b in range(len(bins)):
                completed = open_bins.push(np.array([0]), bins[b : b + 1])
                insert(db, [series], completed, ends=ends)


def _block(
    db: sqlite3.Connection, series: int, layout: Layout, damage: Damage, after: int
) -> SummaryRows:
    return raw(db, series, layout, damage=damage, after=after, limit=ROWS_AT_ONCE)
