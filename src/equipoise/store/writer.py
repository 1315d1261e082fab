"""The one writer of a run file."""

import os
import sqlite3
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from equipoise.errors import RunFileError
from equipoise.records import Applied, Finding, Reading, RunInfo
from equipoise.store import connection, schema
from equipoise.store.lock import WriterLock
from equipoise.store.packing import Layout
from equipoise.store.sheaf import Sheaf


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
        self._sheaves: dict[Layout, Sheaf] = {}
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
                self._add_readings(db, readings)
                self._add_events(db, "finding", findings)
                self._add_events(db, "applied", applied)
                db.execute("COMMIT")
            except BaseException:
                db.execute("ROLLBACK")
                self._last_id = last_id
                self._sheaves.clear()
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
            self._sheaves.setdefault(layout, Sheaf(layout)).add(db, ids, readings)

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
