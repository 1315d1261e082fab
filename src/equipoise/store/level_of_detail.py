"""Level of detail: the summaries that show a window, the readings that show a run."""

import sqlite3
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from equipoise.store import summaries
from equipoise.store.bins import FAN, Bins, Integers, joined, merged, row_bins
from equipoise.store.checksums import Damage, Row
from equipoise.store.packing import Array, Layout

Window = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """One site's values over training, each entry a stretch of steps."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    rows: NDArray[np.int64]
    """Readings behind an entry: 1, 16, 256, …; fewer in the last, unfinished one."""
    low: Array
    """Over heads and rows, of the finite values; NaN where there are none."""
    mean: Array
    high: Array
    broken: NDArray[np.int64]
    """How many values were NaN or Inf."""


@dataclass(frozen=True, slots=True)
class SeriesRange:
    """A series in an open file, and the readings (after, until] of interest."""

    db: sqlite3.Connection
    series: int
    layout: Layout
    damage: Damage
    after: int = 0
    until: int = sys.maxsize

    def within(self, window: Window) -> "SeriesRange":
        """Return the range of the bins that touch the window of steps."""
        query = (
            "SELECT min(last_id), max(last_id) FROM summary WHERE series = ? "
            "AND level = 1 AND last >= ? AND first <= ?"
        )
        first, last = self.db.execute(query, (self.series, *window)).fetchone()
        end = summaries.last_id(self.db, self.series, 1)
        if first is None:  # only what is not in a complete bin yet
            first = last = end
            inside = replace(self, after=end)
        else:
            until = sys.maxsize if last == end else last
            inside = replace(self, after=self._before(first), until=until)
        self._check_edges(first, last)
        return inside

    def _before(self, last_id: int) -> int:
        """Return the bin of level 1 before one; 0 if there is none."""
        query = (
            "SELECT max(last_id) FROM summary "
            "WHERE series = ? AND level = 1 AND last_id < ?"
        )
        return self.db.execute(query, (self.series, last_id)).fetchone()[0] or 0

    def _check_edges(self, first: int, last: int) -> None:
        """Note a damaged bin just outside a window: it may belong inside."""
        (after,) = self.db.execute(
            "SELECT min(last_id) FROM summary WHERE series = ? AND level = 1 "
            "AND last_id > ?",
            (self.series, last),
        ).fetchone()
        before = self._before(self._before(first))
        until = after or sys.maxsize
        replace(self, after=before, until=until)._stored(1)

    def nearest(self, step: int) -> tuple[int, Array] | None:
        """Return the step nearest to one that has a row, and the row; the latest."""
        query = (
            "SELECT min(last) FROM summary WHERE series = ? AND level = 1 AND last >= ?"
        )
        (last,) = self.db.execute(query, (self.series, step)).fetchone()
        window = self.within((step, step if last is None else last))
        rows = summaries.raw(
            self.db,
            self.series,
            self.layout,
            damage=self.damage,
            after=window._before(window.after),
            until=window.until,
        )
        if not rows.steps:
            return None
        gaps = np.abs(np.array(rows.steps, np.int64) - step)
        row = len(gaps) - 1 - int(gaps[::-1].argmin())
        return rows.steps[row], rows.values[row]

    def level(self, points: int) -> int:
        """Return the finest level of at most ``points`` bins."""
        complete, level = self._count(1), 0
        bins = FAN * complete + FAN - 1
        while bins > points and complete:
            level += 1
            bins = complete + 1
            complete = self._count(level + 1)
        return level

    def _count(self, level: int) -> int:
        query = (
            "SELECT count(*) FROM summary WHERE series = ? AND level = ? "
            "AND last_id > ? AND last_id <= ?"
        )
        key = (self.series, level, self.after, self.until)
        return int(self.db.execute(query, key).fetchone()[0])

    def bins(self, level: int) -> Bins:
        """Return the bins of a level, and one more of whatever comes after them."""
        if level == 0:
            return self._rows()
        complete = self._stored(level)
        end = int(complete.last_id[-1]) if len(complete) else self.after
        rest = replace(self, after=end).bins(level - 1)
        if not len(rest):
            return complete
        if len(rest) > FAN:  # they fill a bin of this level, which must be there
            self.damage.note(self.damage.summaries(self.series), (level, end))
        return joined([complete, merged(rest, self.layout, fan=len(rest))])

    def _stored(self, level: int) -> Bins:
        window = {"after": self.after, "until": self.until}
        return summaries.stored(
            self.db, self.series, level, self.layout, damage=self.damage, **window
        )

    def _rows(self) -> Bins:
        """Return a bin per row, from the rows themselves where no block has them."""
        stored = self._stored(0)
        window = {
            "after": int(stored.last_id[-1]) if len(stored) else self.after,
            "until": self.until,
        }
        rows = summaries.raw(
            self.db, self.series, self.layout, damage=self.damage, **window
        )
        return joined([stored, row_bins(*rows[:3], self.layout)])


def by_site(bins: Bins, layout: Layout, window: Window | None) -> dict[str, Summary]:
    """Return the bins that touch the window, site by site."""
    if window is not None:
        bins = _touching(bins, window)
    return {
        site: Summary(
            bins.first,
            bins.last,
            bins.rows,
            bins.low[:, s],
            bins.mean[:, s],
            bins.high[:, s],
            bins.broken[:, s].astype(np.int64),
        )
        for s, site in enumerate(layout.sites)
    }


def _touching(bins: Bins, window: Window) -> Bins:
    inside = (bins.last >= window[0]) & (bins.first <= window[1])
    places = np.flatnonzero(inside)
    if len(places) and len(places) == places[-1] - places[0] + 1:
        return bins[int(places[0]) : int(places[-1]) + 1]  # a view: no copy of MBs
    return bins[inside]


def in_order(parts: list[Summary]) -> Summary:
    """Return one summary of a site that was written under several layouts."""
    if len(parts) == 1 and (np.diff(parts[0].first) >= 0).all():
        return parts[0]
    names = Summary.__slots__
    columns = [np.concatenate([getattr(p, name) for p in parts]) for name in names]
    order = np.argsort(columns[0], kind="stable")
    return Summary(*(column[order] for column in columns))


def rows_in_order(parts: list[tuple[Integers, Array]]) -> tuple[Integers, Array]:
    """Return one ascending series, the last written row of each step."""
    heads = max(x_RW.shape[1] for _, x_RW in parts)
    steps = np.concatenate([steps for steps, _ in parts])
    x_RW = np.concatenate([_widened(x_RW, heads) for _, x_RW in parts])
    _, last = np.unique(steps[::-1], return_index=True)
    order = len(steps) - 1 - last
    return steps[order], x_RW[order, 0] if heads == 1 else x_RW[order]


def _widened(x_RW: Array, heads: int) -> Array:
    """Return rows of ``heads`` values: NaN where a head did not exist then."""
    missing = heads - x_RW.shape[1]
    return np.pad(x_RW, ((0, 0), (0, missing)), constant_values=np.nan)


FIRST, LATEST, BETWEEN, SCALARS = 16, 16, 48, 3000
"""Sampled steps of a skim: the first and the latest, evenly between them; scalars."""


@dataclass(frozen=True, slots=True)
class Skim:
    """Some readings of a long run, spread over all of it, in the order of writing."""

    ids: list[int]
    steps: int
    """Sampled steps among them."""
    of: int
    """Sampled steps of the run."""


def skim(db: sqlite3.Connection, layouts: Mapping[int, Layout]) -> Skim:
    """Choose readings such that each chosen step has all its quantities.

    The steps are those of the longest series with sites. What was written with one of
    its readings has a neighbouring number and the same step.
    """
    scalars = [key for key, layout in layouts.items() if layout.sites == ("",)]
    wide = [key for key in layouts if key not in scalars]
    ids = {found for key in scalars for found in _spread(_ids(db, key), SCALARS)}
    counts = {key: _ids(db, key) for key in wide}
    longest = max(counts.values(), key=len, default=[])
    chosen = _spread(longest, FIRST + LATEST + BETWEEN)
    near = 2 * len(layouts)
    query = (
        "SELECT id FROM reading WHERE id BETWEEN ? AND ? AND step = "
        "(SELECT step FROM reading WHERE id = ?)"
    )
    for anchor in chosen:
        around = db.execute(query, (anchor - near, anchor + near, anchor))
        ids.update(row[0] for row in around)
    return Skim(sorted(ids), len(chosen), len(longest))


def _ids(db: sqlite3.Connection, series: int) -> list[int]:
    query = "SELECT id FROM reading WHERE series = ? ORDER BY id"
    return [row[0] for row in db.execute(query, (series,))]


def _spread(ids: list[int], most: int) -> list[int]:
    """Return the first, the latest, and others evenly between, in order."""
    if len(ids) <= most:
        return ids
    middle = ids[FIRST:-LATEST]
    picks = np.linspace(0, len(middle) - 1, most - FIRST - LATEST).astype(np.int64)
    return [*ids[:FIRST], *(middle[n] for n in picks.tolist()), *ids[-LATEST:]]


def rows_of(db: sqlite3.Connection, ids: list[int]) -> list[Row]:
    """Return the rows of these readings as they are in the file."""
    query = (
        "SELECT id, series, step, prev, data, sum FROM reading "
        f"WHERE id IN ({', '.join('?' * len(ids))}) ORDER BY id"
    )
    return db.execute(query, ids).fetchall()
