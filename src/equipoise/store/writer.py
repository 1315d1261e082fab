"""The writer of a run file; there is one at a time.

Series that share a layout are written together, as a ``SeriesGroup``.
"""

import atexit
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from equipoise.errors import RunFileError
from equipoise.records import Applied, Finding, Reading, RunInfo
from equipoise.store import schema, summaries
from equipoise.store.forks import forget_when_forked
from equipoise.store.lock import WriterLock
from equipoise.store.network import EVERY_S, OpenFile, on_network
from equipoise.store.packing import Array, Layout, pack
from equipoise.store.schema import transaction
from equipoise.store.summaries import Integers, OpenBins, row_bins


class SeriesGroup:
    """The quantities of one layout: their rows, and the summaries over them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._slots: dict[str, int] = {}
        self._series: list[int] = []
        self._open_bins = OpenBins(layout)

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
            summaries.insert(db, self._series, self._open_bins.push(own, bins[turn]))

    def _values(self, readings: Sequence[Reading]) -> Array:
        values = chain.from_iterable(reading.values for reading in readings)
        x = np.fromiter(chain.from_iterable(values), np.float64)
        return x.reshape(len(readings), self._layout.width)

    def _slot(self, db: sqlite3.Connection, quantity: str) -> int:
        if quantity not in self._slots:
            slot, series = len(self._series), self._number(db, quantity)
            summaries.restore(db, series, self._layout, bins=self._open_bins, slot=slot)
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


class RunWriter:
    """Append readings, findings and remedies; each append is all or nothing.

    On an existing file it continues: what was committed stays, ``info`` is the file's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        info: RunInfo | None = None,
        *,
        network: bool | None = None,
        publish_every: float = EVERY_S,
    ) -> None:
        """Open a run for writing.

        Args:
            path: The run file; made, with its folders, if it is not there.
            info: What a new run is; not needed to continue one.
            network: Whether the path is on a network filesystem; detected if None.
            publish_every: Seconds between the snapshots put there.
        """
        self.path = Path(path)
        if self.path.is_dir():
            raise RunFileError(f"{path}: a directory; give a file such as {path}/a.eqp")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.guard = threading.RLock()
        self._groups: dict[Layout, SeriesGroup] = {}
        self._lock = WriterLock(self.path)
        try:
            remote = on_network(self.path) if network is None else network
            self._file = OpenFile(self.path, remote=remote, publish_every=publish_every)
        except BaseException:
            self._lock.release()
            raise
        try:
            self.info = self._begun(self._file.db, info)
            self._file.start()
        except BaseException:
            self._file.abort()
            self._lock.release()
            raise
        self._is_open = True
        forget_when_forked(self)
        atexit.register(self.close)  # a script that just ends leaves one file too

    @classmethod
    def resume(cls, path: str | os.PathLike[str]) -> Self:
        """Continue a run that exists; a killed one included."""
        if not Path(path).is_file():
            raise RunFileError(f"{path}: no such run file to resume")
        return cls(path)

    def _begun(self, db: sqlite3.Connection, info: RunInfo | None) -> RunInfo:
        """Make the tables where there are none, and return what the file says it is."""
        if schema.is_blank(db):
            if info is None:
                raise RunFileError(f"{self.path}: nothing in it to resume")
            with transaction(db):
                schema.create(db)
                db.execute("INSERT INTO meta VALUES ('info', ?)", (info.to_json(),))
        if schema.checked_version(db, self.path) < schema.VERSION:
            with transaction(db):
                schema.upgrade(db)
        self._last_id = schema.last_id(db)
        row = db.execute("SELECT value FROM meta WHERE key = 'info'").fetchone()
        return RunInfo.from_json(row[0])

    def append(
        self,
        readings: Iterable[Reading],
        *,
        findings: Iterable[Finding] = (),
        applied: Iterable[Applied] = (),
    ) -> None:
        """Add them in one transaction: when this returns, kill -9 loses none of it."""
        with self.guard:
            if not self._is_open:
                raise RunFileError(
                    f"{self.path}: this writer is closed, or is the parent process's"
                )
            db = self._file.db
            try:
                with transaction(db):
                    self._add_readings(db, readings)
                    self._add_events(db, "finding", findings)
                    self._add_events(db, "applied", applied)
            except BaseException:
                self._groups.clear()  # they count what did not happen; the file knows
                raise
            self._file.committed()

    def _next_id(self) -> int:
        """Readings and events share one count, so that one number is a cursor."""
        self._last_id += 1
        return self._last_id

    def _add_readings(self, db: sqlite3.Connection, given: Iterable[Reading]) -> None:
        alike: dict[Layout, tuple[list[int], list[Reading]]] = {}
        for reading in given:
            layout = Layout(reading.sites, tuple(map(len, reading.values)))
            ids, readings = alike.setdefault(layout, ([], []))
            ids.append(self._next_id())
            readings.append(reading)
        now = time.time()
        steps = {(r.step, now) for _, readings in alike.values() for r in readings}
        db.executemany("INSERT OR IGNORE INTO step VALUES (?, ?)", steps)
        for layout, (ids, readings) in alike.items():
            self._groups.setdefault(layout, SeriesGroup(layout)).add(db, ids, readings)

    def _add_events(
        self, db: sqlite3.Connection, kind: str, events: Iterable[Finding | Applied]
    ) -> None:
        for event in events:
            row = (self._next_id(), kind, event.step, event.to_json())
            db.execute("INSERT INTO event VALUES (?, ?, ?, ?)", row)

    def close(self) -> None:
        """Fold the WAL back: what remains is one file, readable from anywhere."""
        if not self._is_open:
            return
        self._file.stop_thread()  # before the guard: the thread may wait for a fork
        with self.guard:
            if self._is_open:
                self._is_open = False
                self._file.close()
                self._lock.release()
        atexit.unregister(self.close)

    def forget(self) -> None:
        """Be closed in a forked child, and leave the parent's file alone."""
        if self._is_open:
            self._is_open = False
            self._file.forget()
            self._lock.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
