"""The one writer of a run file."""

import atexit
import os
import sqlite3
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import equipoise.store.schema as schema
import equipoise.store.snapshot as snapshot
from equipoise.errors import RunFileError
from equipoise.records import Applied, Finding, Reading, RunInfo
from equipoise.store.connection import transaction
from equipoise.store.forks import forget_when_forked
from equipoise.store.live import LiveFile
from equipoise.store.lock import WriterLock
from equipoise.store.mounts import on_network
from equipoise.store.packing import Layout
from equipoise.store.sheaf import Sheaf


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
        publish_every: float = snapshot.EVERY_S,
    ) -> None:
        """Open a run for writing.

        Args:
            path: The run file; made, with its folders, if it is not there.
            info: What a new run is; not needed to continue one.
            network: Whether the path is on a network filesystem; found out if None.
            publish_every: Seconds between the snapshots put there.
        """
        self.path = Path(path)
        if self.path.is_dir():
            raise RunFileError(f"{path}: a directory; give a file such as {path}/a.eqp")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.guard = threading.RLock()
        self._sheaves: dict[Layout, Sheaf] = {}
        self._lock = WriterLock(self.path)
        try:
            away = on_network(self.path) if network is None else network
            self._file = LiveFile(self.path, away=away, publish_every=publish_every)
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
                self._sheaves.clear()  # they count what did not happen; the file knows
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
            self._sheaves.setdefault(layout, Sheaf(layout)).add(db, ids, readings)

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
        self._file.rest()  # before the guard: its thread may be waiting for a fork
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
