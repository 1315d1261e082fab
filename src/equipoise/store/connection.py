"""Connections to a run file."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from equipoise.errors import RunFileError

BUSY_S = 10.0


def writing(path: Path) -> sqlite3.Connection:
    """Open for writing: commits reach the operating system at once, the disk later.

    WAL with synchronous=NORMAL loses nothing when the process is killed; after a power
    cut the last seconds may be missing, but the file is whole. Only checkpoints wait
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
