"""The one writer of a run file."""

import os
import sqlite3
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from equipoise.errors import RunFileError
from equipoise.records import Applied, Finding, Reading, RunInfo
from equipoise.store import connection, schema, summaries
from equipoise.store.lock import WriterLock
from equipoise.store.packing import Layout, flat, pack


@dataclass(frozen=True, slots=True)
class _Series:
    id: int
    tower: summaries.Tower


class RunWriter:
    """Append readings, findings and remedies; each append is all or nothing.

    On an existing file it continues: what was committed stays, ``info`` is the file's.
    """

    def __init__(
        self, path: str | os.PathLike[str], info: RunInfo | None = None
    ) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise RunFileError(f"{path}: a directory; give a file such as {path}/a.eqp")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._guard = threading.Lock()
        self._series: dict[tuple[str, Layout], _Series] = {}
        self._lock = WriterLock(self.path)
        try:
            self._db: sqlite3.Connection | None = connection.writing(self.path)
            self.info = self._begun(self._db, info)
        except BaseException:
            self._lock.release()
            raise
        connection.forget_when_forked(self)

    @classmethod
    def resume(cls, path: str | os.PathLike[str]) -> Self:
        """Continue a run that exists; a killed one included."""
        if not Path(path).is_file():
            raise RunFileError(f"{path}: no such run file to resume")
        return cls(path)

    def _begun(self, db: sqlite3.Connection, info: RunInfo | None) -> RunInfo:
        if schema.is_blank(db):
            if info is None:
                raise RunFileError(f"{self.path}: nothing in it to resume")
            db.execute("BEGIN IMMEDIATE")
            schema.create(db)
            db.execute("INSERT INTO meta VALUES ('info', ?)", (info.to_json(),))
            db.execute("COMMIT")
        if schema.checked_version(db, self.path) < schema.VERSION:
            db.execute("BEGIN IMMEDIATE")
            schema.upgrade(db)
            db.execute("COMMIT")
        query = "SELECT max(id) FROM (SELECT max(id) AS id FROM {} UNION ALL {})"
        last = db.execute(query.format("reading", "SELECT max(id) FROM event"))
        self._last_id = last.fetchone()[0] or 0
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
        with self._guard:
            db = self._open()
            last_id = self._last_id
            db.execute("BEGIN IMMEDIATE")
            try:
                for reading in readings:
                    self._add_reading(db, reading)
                self._add_events(db, "finding", findings)
                self._add_events(db, "applied", applied)
                db.execute("COMMIT")
            except BaseException:
                db.execute("ROLLBACK")
                self._last_id = last_id
                self._series.clear()
                raise

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            raise RunFileError(
                f"{self.path}: this writer is closed, or belongs to the parent process"
            )
        return self._db

    def _next_id(self) -> int:
        """Readings and events share one count, so that one number is a cursor."""
        self._last_id += 1
        return self._last_id

    def _add_reading(self, db: sqlite3.Connection, reading: Reading) -> None:
        layout = Layout(reading.sites, tuple(map(len, reading.values)))
        series = self._known(db, reading.quantity, layout)
        key, x_W = self._next_id(), flat(reading.values)
        self._add_step(db, reading.step)
        row = (key, series.id, reading.step, pack(x_W))
        db.execute("INSERT INTO reading VALUES (?, ?, ?, ?)", row)
        for level, bins in series.tower.push(key, reading.step, x_W):
            summaries.insert(db, series.id, level, bins)

    def _add_step(self, db: sqlite3.Connection, step: int) -> None:
        db.execute("INSERT OR IGNORE INTO step VALUES (?, ?)", (step, time.time()))

    def _known(
        self, db: sqlite3.Connection, quantity: str, layout: Layout
    ) -> "_Series":
        known = self._series.get((quantity, layout))
        if known is None:
            key = (quantity, layout.to_json())
            db.execute(
                "INSERT OR IGNORE INTO series (quantity, layout) VALUES (?, ?)", key
            )
            query = "SELECT id FROM series WHERE quantity = ? AND layout = ?"
            number = int(db.execute(query, key).fetchone()[0])
            known = _Series(number, summaries.Tower.restored(db, number, layout))
            self._series[quantity, layout] = known
        return known

    def _add_events(
        self, db: sqlite3.Connection, kind: str, events: Iterable[Finding | Applied]
    ) -> None:
        for event in events:
            row = (self._next_id(), kind, event.step, event.to_json())
            db.execute("INSERT INTO event VALUES (?, ?, ?, ?)", row)

    def close(self) -> None:
        """Fold the WAL back: what remains is one file, readable from anywhere."""
        with self._guard:
            if self._db is None:
                return
            db, self._db = self._db, None
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            # A file left in WAL mode cannot be opened from a read-only place.
            db.execute("PRAGMA journal_mode = DELETE")
            db.close()
            self._lock.release()

    def forget(self) -> None:
        """Drop the connection in a forked child, without closing it."""
        if self._db is not None:
            connection.leak(self._db)
            self._db = None
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
