"""The tables of a run file, and which versions of them we can read."""

import sqlite3
from pathlib import Path

import equipoise.store.summaries as summaries
from equipoise.errors import RunFileError

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
