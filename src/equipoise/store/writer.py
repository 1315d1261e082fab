"""The writer of a run file; there is one at a time.

Series that share a layout are written together, as a ``SeriesGroup``.
"""

import atexit
import os
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np

from equipoise.errors import RunFileError
from equipoise.judging.card import Card
from equipoise.records import Applied, Finding, Reading, RunInfo
from equipoise.store import schema, summaries
from equipoise.store.bins import Integers, row_bins
from equipoise.store.checksums import (
    Damage,
    Row,
    totals,
    with_checksum,
    write_ends,
    write_totals,
)
from equipoise.store.forks import forget_when_forked
from equipoise.store.lock import WriterLock
from equipoise.store.network import EVERY_S, OpenFile, on_network
from equipoise.store.packing import Array, Layout, pack
from equipoise.store.schema import transaction
from equipoise.store.summaries import Ends, OpenBins
from equipoise.text.render import render


class SeriesGroup:
    """The quantities of one layout: their rows, and the summaries over them."""

    def __init__(self, layout: Layout, damage: Damage) -> None:
        self._layout = layout
        self._damage = damage
        self._slots: dict[str, int] = {}
        self._series: list[int] = []
        self._last_ids: dict[int, int] = {}
        self._open_bins = OpenBins(layout)
        self._bin_ends = Ends()

    def add(
        self, db: sqlite3.Connection, ids: Sequence[int], readings: Sequence[Reading]
    ) -> None:
        """Insert the readings, and every bin they complete."""
        slots = [self._slot(db, reading.quantity) for reading in readings]
        steps = [reading.step for reading in readings]
        series = [self._series[slot] for slot in slots]
        x_RW = self._values(readings)
        rows = zip(ids, series, steps, pack(x_RW), strict=True)
        db.executemany(
            "INSERT INTO reading (id, series, step, prev, data, sum) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            [self._row(*row) for row in rows],
        )
        write_ends(db, {s: self._last_ids[s] for s in series})
        bins = row_bins(ids, steps, x_RW, self._layout)
        for turn in _turns(slots):
            own = np.array(slots, np.int64)[turn]
            completed = self._open_bins.push(own, bins[turn])
            summaries.insert(db, self._series, completed, ends=self._bin_ends)

    def _row(self, key: int, series: int, step: int, data: bytes) -> Row:
        prev = self._last_ids[series]
        self._last_ids[series] = key
        return with_checksum(key, series, step, prev, data)

    def _values(self, readings: Sequence[Reading]) -> Array:
        values = chain.from_iterable(reading.values for reading in readings)
        x = np.fromiter(chain.from_iterable(values), np.float64)
        return x.reshape(len(readings), self._layout.width)

    def _slot(self, db: sqlite3.Connection, quantity: str) -> int:
        if quantity not in self._slots:
            slot = len(self._series)
            series = self._known(db, quantity)
            if series is None:
                series = self._new(db, quantity)
            else:
                self._restore(db, series, slot)
            self._slots[quantity] = slot
            self._series.append(series)
        return self._slots[quantity]

    def _restore(self, db: sqlite3.Connection, series: int, slot: int) -> None:
        """Go on where an earlier writer of the series stopped."""
        summaries.restore(
            db,
            series,
            self._layout,
            bins=self._open_bins,
            slot=slot,
            ends=self._bin_ends,
            damage=self._damage,
        )
        query = "SELECT max(id) FROM reading WHERE series = ?"
        self._last_ids[series] = db.execute(query, (series,)).fetchone()[0] or 0

    def _known(self, db: sqlite3.Connection, quantity: str) -> int | None:
        query = "SELECT id FROM series WHERE quantity = ? AND layout = ?"
        row = db.execute(query, (quantity, self._layout.to_json())).fetchone()
        return None if row is None else int(row[0])

    def _new(self, db: sqlite3.Connection, quantity: str) -> int:
        (last,) = db.execute("SELECT max(id) FROM series").fetchone()
        series = (last or 0) + 1
        row = with_checksum(series, quantity, self._layout.to_json())
        db.execute("INSERT INTO series VALUES (?, ?, ?, ?)", row)
        self._last_ids[series] = 0
        return int(series)


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


def _put_card(db: sqlite3.Connection, card: Card) -> None:
    """Put a run's card in the place of its last one."""
    facts = replace(card, text={}, opening=())  # a reader has words of its own
    row = with_checksum("card", facts.to_json())
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", row)


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
        self.guard = threading.RLock()
        self._groups: dict[Layout, SeriesGroup] = {}
        self._damage = Damage(self.path)
        self._rewritten = False
        with self._our_errors():
            # Resolved: two names of one file must not become two writers of it.
            real = self.path.resolve()
            real.parent.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(real)
            try:
                remote = on_network(real) if network is None else network
                self._file = OpenFile(real, remote=remote, publish_every=publish_every)
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

    @contextmanager
    def _our_errors(self) -> Iterator[None]:
        """Turn what the disk and SQLite refuse into one error of ours."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise RunFileError(f"{self.path}: cannot be written ({reason})") from error

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
                # An identity of its own: another run may take this one's place.
                own = {"info": info.to_json(), "identity": uuid.uuid4().hex}
                for item in own.items():
                    row = with_checksum(*item)
                    db.execute("INSERT INTO meta VALUES (?, ?, ?)", row)
        if schema.checked_version(db, self.path) < schema.VERSION:
            with transaction(db):
                schema.upgrade(db)
        self._totals = totals(db, self._damage) or schema.counted(db)
        query = "SELECT key, value, sum FROM meta WHERE key = 'info'"
        rows = self._damage.sound(db.execute(query).fetchall(), "run information")
        if not rows:
            raise RunFileError(f"{self.path}: damaged: it does not say what it is")
        return RunInfo.from_json(rows[0][1])

    def append(
        self,
        readings: Iterable[Reading],
        *,
        findings: Iterable[Finding] = (),
        applied: Iterable[Applied] = (),
        card: Card | None = None,
    ) -> None:
        """Add them in one transaction: when this returns, kill -9 loses none of it.

        A file that was deleted meanwhile is made anew, with all that was in it.

        Raises:
            RunFileError: If it cannot be written; nothing of this append is in it then.
        """
        with self.guard, self._our_errors():
            if not self._is_open:
                raise RunFileError(
                    f"{self.path}: this writer is closed, or is the parent process's"
                )
            if self._file.is_lost():
                self._file.write_again()
                self._lock.renew()
                self._rewritten = True
            before = self._totals
            try:
                with transaction(self._file.db) as db:
                    self._add_readings(db, readings)
                    self._add_events(db, "finding", map(render, findings))
                    self._add_events(db, "applied", applied)
                    if card is not None:
                        _put_card(db, card)
                    (series,) = db.execute("SELECT max(id) FROM series").fetchone()
                    self._totals = self._totals._replace(series=series or 0)
                    write_totals(db, self._totals)
            except BaseException:
                self._totals = before
                self._groups.clear()  # they count what did not happen; the file knows
                raise
            self._file.committed()

    def pop_rewritten(self) -> bool:
        """Say, once, whether the file was lost and made anew."""
        found, self._rewritten = self._rewritten, False
        return found

    def _next_id(self) -> int:
        """Readings and events share one count, so that one number is a cursor."""
        self._totals = self._totals._replace(last_id=self._totals.last_id + 1)
        return self._totals.last_id

    def _add_readings(self, db: sqlite3.Connection, given: Iterable[Reading]) -> None:
        alike: dict[Layout, tuple[list[int], list[Reading]]] = {}
        for reading in given:
            layout = Layout(reading.sites, tuple(map(len, reading.values)))
            ids, readings = alike.setdefault(layout, ([], []))
            ids.append(self._next_id())
            readings.append(reading)
        now = time.time()
        steps = {r.step for _, readings in alike.values() for r in readings}
        rows = [with_checksum(step, now) for step in steps]
        added = db.executemany("INSERT OR IGNORE INTO step VALUES (?, ?, ?)", rows)
        self._totals = self._totals._replace(
            steps=self._totals.steps + max(0, added.rowcount)
        )
        for layout, (ids, readings) in alike.items():
            group = self._groups.setdefault(layout, SeriesGroup(layout, self._damage))
            group.add(db, ids, readings)

    def _add_events(
        self, db: sqlite3.Connection, kind: str, events: Iterable[Finding | Applied]
    ) -> None:
        for event in events:
            row = with_checksum(self._next_id(), kind, event.step, event.to_json())
            db.execute("INSERT INTO event VALUES (?, ?, ?, ?, ?)", row)
            name = "findings" if kind == "finding" else "applied"
            count = getattr(self._totals, name) + 1
            self._totals = self._totals._replace(**{name: count})

    def close(self) -> None:
        """Fold the WAL back: what remains is one file, readable from anywhere.

        Raises:
            RunFileError: If that cannot be done; the WAL beside the file then has what
                is not in it, and the next reader or writer finds it there.
        """
        if not self._is_open:
            return
        self._file.stop_thread()  # before the guard: the thread may wait for a fork
        atexit.unregister(self.close)
        with self.guard:
            if self._is_open:
                self._is_open = False
                self._close_file()

    def _close_file(self) -> None:
        try:
            with self._our_errors():
                if self._file.is_lost():
                    self._file.write_again()
                    self._rewritten = True
                self._file.close()
        finally:
            self._lock.release()

    def forget(self) -> None:
        """Be closed in a forked child, and leave the parent's file alone."""
        if self._is_open:
            self._is_open = False
            self._file.forget()
            self._lock.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
