"""The tables of a run file, its versions, and the SQLite connections to it."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from equipoise.errors import RunFileError
from equipoise.store import summaries

APPLICATION = 0x45515031  # "EQP1", so that `file` and we can tell a run from any SQLite
VERSION = 2
"""1 had no summary table."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE step (step INTEGER PRIMARY KEY, time REAL NOT NULL);
CREATE TABLE series (
  id INTEGER PRIMARY KEY, quantity TEXT NOT NULL, layout TEXT NOT NULL,
  UNIQUE (quantity, layout)
);
CREATE TABLE reading (
  id INTEGER PRIMARY KEY, series INTEGER NOT NULL REFERENCES series,
  step INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE INDEX reading_series ON reading (series);
CREATE TABLE event (
  id INTEGER PRIMARY KEY, kind TEXT NOT NULL, step INTEGER NOT NULL, body TEXT NOT NULL
);
CREATE TRIGGER reading_stays BEFORE UPDATE ON reading
  BEGIN SELECT RAISE(ABORT, 'readings are append-only'); END;
CREATE TRIGGER reading_remains BEFORE DELETE ON reading
  BEGIN SELECT RAISE(ABORT, 'readings are append-only'); END;
"""

# Clustered by series and level, so that a view reads neighbouring pages.
SUMMARY = """
CREATE {kind} TABLE summary (
  series INTEGER NOT NULL, level INTEGER NOT NULL, last_id INTEGER NOT NULL,
  first INTEGER NOT NULL, last INTEGER NOT NULL, rows INTEGER NOT NULL,
  data BLOB NOT NULL, PRIMARY KEY (series, level, last_id)
) WITHOUT ROWID;
"""


def statements(script: str) -> list[str]:
    """Return its statements one by one: executescript would commit between them."""
    found, so_far = [], ""
    for line in script.strip().splitlines():
        so_far += line + "\n"
        if sqlite3.complete_statement(so_far):
            found.append(so_far)
            so_far = ""
    return found


def is_blank(db: sqlite3.Connection) -> bool:
    """Say whether the file holds nothing yet: new, or its maker was killed at birth."""
    return not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]


def create(db: sqlite3.Connection) -> None:
    """Make the tables, inside the caller's transaction."""
    for statement in statements(TABLES):
        db.execute(statement)
    db.execute(SUMMARY.format(kind=""))
    db.execute(f"PRAGMA application_id = {APPLICATION}")
    db.execute(f"PRAGMA user_version = {VERSION}")


def upgrade(db: sqlite3.Connection) -> None:
    """Bring an older file to this version, inside the caller's transaction."""
    db.execute(SUMMARY.format(kind=""))
    summaries.build(db)
    db.execute(f"PRAGMA user_version = {VERSION}")


def complete(db: sqlite3.Connection, version: int) -> None:
    """Give a reader of an older file what is missing, without touching the file."""
    if version < VERSION:
        db.execute(SUMMARY.format(kind="TEMP"))
        summaries.build(db)


def checked_version(db: sqlite3.Connection, path: Path) -> int:
    """Return the file's schema version, or refuse a file we cannot read."""
    if is_blank(db):
        raise RunFileError(f"{path}: nothing has been written here yet")
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise RunFileError(f"{path}: a SQLite file, but not a run of Equipoise")
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > VERSION:
        raise RunFileError(
            f"{path}: written by a newer Equipoise (file format {version}, this one "
            f"reads up to {VERSION}): upgrade with pip install -U equipoise"
        )
    return version


def last_id(db: sqlite3.Connection) -> int:
    """Return the number of the last thing appended; 0 if nothing was."""
    tables = ("reading", "event")
    ids = [db.execute(f"SELECT max(id) FROM {t}").fetchone()[0] for t in tables]
    return max(last or 0 for last in ids)


BUSY_S = 10.0


def writing(path: Path) -> sqlite3.Connection:
    """Open for writing: commits reach the operating system at once, the disk later.

    WAL with synchronous=NORMAL loses nothing when the process is killed; after a power
    cut the last seconds may be missing, but the file is intact. Only checkpoints wait
    for the disk, and those are left to the housekeeper.
    """
    db = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    try:
        db.execute("PRAGMA journal_mode = WAL")
    except sqlite3.DatabaseError as error:
        db.close()
        raise RunFileError(f"{path}: not a run file ({error})") from error
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA wal_autocheckpoint = 0")
    return db


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open for one short read transaction, so that no reader holds up a writer."""
    if not path.is_file():
        raise RunFileError(f"{path}: no such run file")
    uri = f"{path.resolve().as_uri()}?mode=ro"
    db = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        db.execute("BEGIN")
        yield db
    except sqlite3.DatabaseError as error:
        raise RunFileError(f"{path}: cannot be read ({error})") from error
    finally:
        db.close()


def checkpoint(path: Path) -> None:
    """Move what the WAL holds into the file, as far as readers allow."""
    db = writing(path)
    try:
        db.execute("PRAGMA wal_checkpoint(PASSIVE)")
    finally:
        db.close()


def fold(db: sqlite3.Connection) -> None:
    """Empty the WAL into the file and close: what remains is one plain file."""
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    # A file left in WAL mode cannot be opened from a read-only place. If a reader is in
    # the way it stays in WAL mode, which every other place can open.
    with suppress(sqlite3.OperationalError):
        db.execute("PRAGMA journal_mode = DELETE")
    db.close()


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of it, or none."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk makes SQLite roll back by itself
            db.execute("ROLLBACK")
        raise
