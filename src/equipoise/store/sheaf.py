"""All series that share a layout, written together."""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

import equipoise.store.summaries as summaries
from equipoise.records import Reading
from equipoise.store.packing import Array, Layout, pack
from equipoise.store.pyramid import Integers, row_bins
from equipoise.store.tower import Tower


class Sheaf:
    """The quantities of one layout: their rows, and the pyramids above them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._slots: dict[str, int] = {}
        self._series: list[int] = []
        self._tower = Tower(layout)

    def add(
        self, db: sqlite3.Connection, ids: Sequence[int], readings: Sequence[Reading]
    ) -> None:
        """Insert the readings, and every bin they complete."""
        slots = [self._slot(db, reading.quantity) for reading in readings]
        steps = [reading.step for reading in readings]
        series = [self._series[slot] for slot in slots]
        x_RW = self._values(readings)
        rows = zip(ids, series, steps, pack(x_RW), strict=True)
        db.executemany("INSERT INTO reading VALUES (?, ?, ?, ?)", rows)
        bins = row_bins(ids, steps, x_RW, self._layout)
        for turn in _turns(slots):
            own = np.array(slots, np.int64)[turn]
            summaries.insert(db, self._series, self._tower.push(own, bins[turn]))

    def _values(self, readings: Sequence[Reading]) -> Array:
        values = chain.from_iterable(reading.values for reading in readings)
        x = np.fromiter(chain.from_iterable(values), np.float64)
        return x.reshape(len(readings), self._layout.width)

    def _slot(self, db: sqlite3.Connection, quantity: str) -> int:
        if quantity not in self._slots:
            slot, series = len(self._series), self._number(db, quantity)
            summaries.restore(db, series, self._layout, tower=self._tower, slot=slot)
            self._slots[quantity] = slot
            self._series.append(series)
        return self._slots[quantity]

    def _number(self, db: sqlite3.Connection, quantity: str) -> int:
        key = (quantity, self._layout.to_json())
        db.execute("INSERT OR IGNORE INTO series (quantity, layout) VALUES (?, ?)", key)
        query = "SELECT id FROM series WHERE quantity = ? AND layout = ?"
        return int(db.execute(query, key).fetchone()[0])


def _turns(slots: Sequence[int]) -> Iterator[slice | Integers]:
    """Yield rows such that no slot comes twice in a turn: several steps at once."""
    if len(set(slots)) == len(slots):
        yield slice(None)
        return
    seen: Counter[int] = Counter()
    turn_R = np.zeros(len(slots), np.int64)
    for r, slot in enumerate(slots):
        turn_R[r] = seen[slot]
        seen[slot] += 1
    for turn in range(max(seen.values())):
        yield np.flatnonzero(turn_R == turn)
