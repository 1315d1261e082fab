"""The tables of a run file, its versions, and the SQLite connections to it."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from equipoise.errors import EquipoiseError, RunFileError
from equipoise.store import summaries
from equipoise.store.checksums import Totals, checksum, write_ends, write_totals

APPLICATION = 0x45515031  # "EQP1", so that `file` and we can tell a run from any SQLite
VERSION = 3
"""1 had no summary table; 1 and 2 had no checksums."""

TABLES = """
CREATE TABLE meta (
  key TEXT PRIMARY KEY, value TEXT NOT NULL, sum INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE step (
  step INTEGER PRIMARY KEY, time REAL NOT NULL, sum INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE series (
  id INTEGER PRIMARY KEY, quantity TEXT NOT NULL, layout TEXT NOT NULL,
  sum INTEGER NOT NULL DEFAULT 0, UNIQUE (quantity, layout)
);
CREATE TABLE reading (
  id INTEGER PRIMARY KEY, series INTEGER NOT NULL REFERENCES series,
  step INTEGER NOT NULL, prev INTEGER NOT NULL DEFAULT 0, data BLOB NOT NULL,
  sum INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX reading_series ON reading (series);
CREATE TABLE event (
  id INTEGER PRIMARY KEY, kind TEXT NOT NULL, step INTEGER NOT NULL,
  body TEXT NOT NULL, sum INTEGER NOT NULL DEFAULT 0
);
"""

TRIGGERS = """
CREATE TRIGGER reading_stays BEFORE UPDATE ON reading
  BEGIN SELECT RAISE(ABORT, 'readings are append-only'); END;
CREATE TRIGGER reading_remains BEFORE DELETE ON reading
  BEGIN SELECT RAISE(ABORT, 'readings are append-only'); END;
"""

# How much has been written: what a row's own checksum cannot tell is that it is gone.
COUNTS = """
CREATE TABLE series_end (
  series INTEGER PRIMARY KEY, last_id INTEGER NOT NULL, sum INTEGER NOT NULL
);
CREATE TABLE totals (
  id INTEGER PRIMARY KEY CHECK (id = 0), upgraded INTEGER NOT NULL,
  last_id INTEGER NOT NULL, series INTEGER NOT NULL, steps INTEGER NOT NULL,
  findings INTEGER NOT NULL, applied INTEGER NOT NULL, sum INTEGER NOT NULL
);
"""

# Clustered by series and level, so that a view reads neighbouring pages.
SUMMARY = """
CREATE {kind} TABLE summary (
  series INTEGER NOT NULL, level INTEGER NOT NULL, last_id INTEGER NOT NULL,
  prev INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
  rows INTEGER NOT NULL, data BLOB NOT NULL, sum INTEGER NOT NULL,
  PRIMARY KEY (series, level, last_id)
) WITHOUT ROWID;
"""

# What a file without checksums looks like to queries that ask for them. A temporary
# view comes before a table of the same name.
OLD_VIEWS = """
CREATE TEMP VIEW meta AS SELECT *, NULL AS sum FROM main.meta;
CREATE TEMP VIEW step AS SELECT *, NULL AS sum FROM main.step;
CREATE TEMP VIEW series AS SELECT *, NULL AS sum FROM main.series;
CREATE TEMP VIEW event AS SELECT *, NULL AS sum FROM main.event;
CREATE TEMP VIEW reading AS SELECT *, 0 AS prev, NULL AS sum FROM main.reading;
CREATE TEMP VIEW series_end AS
  SELECT NULL AS series, NULL AS last_id, NULL AS sum WHERE 0;
CREATE TEMP VIEW totals AS SELECT NULL AS id, NULL AS sum WHERE 0;
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
    return not db.execute("SELECT count(*) FROM main.sqlite_master").fetchone()[0]


def _run(db: sqlite3.Connection, script: str) -> None:
    for statement in statements(script):
        db.execute(statement)


def create(db: sqlite3.Connection) -> None:
    """Make the tables, inside the caller's transaction."""
    for script in (TABLES, TRIGGERS, COUNTS, SUMMARY.format(kind="")):
        _run(db, script)
    db.execute(f"PRAGMA application_id = {APPLICATION}")
    db.execute(f"PRAGMA user_version = {VERSION}")
    write_totals(db, Totals(0, 0, 0, 0, 0, 0))


def upgrade(db: sqlite3.Connection) -> None:
    """Bring an older file to this version, inside the caller's transaction."""
    for name in ("reading_stays", "reading_remains"):
        db.execute(f"DROP TRIGGER {name}")
    for table in ("meta", "step", "series", "reading", "event"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN sum INTEGER NOT NULL DEFAULT 0")
    db.execute("ALTER TABLE reading ADD COLUMN prev INTEGER NOT NULL DEFAULT 0")
    db.execute("DROP TABLE IF EXISTS summary")
    _run(db, COUNTS)
    _run(db, SUMMARY.format(kind=""))
    _add_checksums(db)
    _run(db, TRIGGERS)
    summaries.build(db)
    write_totals(db, counted(db))
    db.execute(f"PRAGMA user_version = {VERSION}")


def _add_checksums(db: sqlite3.Connection) -> None:
    tables = {
        "meta": ("key", "value"),
        "step": ("step", "time"),
        "series": ("id", "quantity", "layout"),
        "event": ("id", "kind", "step", "body"),
    }
    for table, columns in tables.items():
        rows = db.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall()
        query = f"UPDATE {table} SET sum = ? WHERE {columns[0]} = ?"
        db.executemany(query, [(checksum(*row), row[0]) for row in rows])
    ends: dict[int, int] = {}
    query = "SELECT id, series, step, data FROM reading ORDER BY id"
    for key, series, step, data in db.execute(query).fetchall():
        prev = ends.get(series, 0)
        ends[series] = key
        found = checksum(key, series, step, prev, data)
        db.execute(
            "UPDATE reading SET prev = ?, sum = ? WHERE id = ?", (prev, found, key)
        )
    write_ends(db, ends)


def counted(db: sqlite3.Connection) -> Totals:
    """Return how much the file holds, by counting: for one that does not say."""
    kinds = dict(db.execute("SELECT kind, count(*) FROM event GROUP BY kind"))
    last = last_id(db)
    (series,) = db.execute("SELECT count(*) FROM series").fetchone()
    (steps,) = db.execute("SELECT count(*) FROM step").fetchone()
    counts = (kinds.get(kind, 0) for kind in ("finding", "applied"))
    return Totals(last, last, series, steps, *counts)


def look_current(db: sqlite3.Connection, version: int) -> None:
    """Let a reader ask an older file as if it were current, without touching it."""
    if version < VERSION:
        _run(db, OLD_VIEWS)


def add_summaries(db: sqlite3.Connection, version: int) -> None:
    """Give a reader of an older file its summaries, without touching the file."""
    if version == 2:
        db.execute(
            "CREATE TEMP VIEW summary AS SELECT *, 0 AS prev, NULL AS sum "
            "FROM main.summary"
        )
    elif version < 2:
        _run(db, SUMMARY.format(kind="TEMP"))
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
    columns = {row[1] for row in db.execute("PRAGMA main.table_info(reading)")}
    if ("sum" in columns) != (version >= 3) or version < 1:
        raise RunFileError(f"{path}: damaged: its tables are not of version {version}")
    return version


def last_id(db: sqlite3.Connection) -> int:
    """Return the number of the last thing appended; 0 if nothing was."""
    tables = ("reading", "event")
    ids = [db.execute(f"SELECT max(id) FROM {t}").fetchone()[0] for t in tables]
    return max(last or 0 for last in ids)


BUSY_S = 10.0


def writing(path: Path, *, create: bool = True) -> sqlite3.Connection:
    """Open for writing: commits reach the operating system at once, the disk later.

    WAL with synchronous=NORMAL loses nothing when the process is killed; after a power
    cut the last seconds may be missing, but the file is intact. Only checkpoints wait
    for the disk, and those are left to the housekeeper.
    """
    uri = f"{path.resolve().as_uri()}?mode={'rwc' if create else 'rw'}"
    db = sqlite3.connect(
        uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
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
    """Open for one short read transaction, so that no reader holds up a writer.

    Raises:
        RunFileError: If it is no run file, or what is in it makes no sense.
    """
    if not path.is_file():
        raise RunFileError(f"{path}: no such run file")
    uri = f"{path.resolve().as_uri()}?mode=ro"
    try:
        db = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)
    except sqlite3.Error as error:
        raise RunFileError(f"{path}: cannot be read ({error})") from error
    try:
        db.execute("BEGIN")
        yield db
    except EquipoiseError:
        raise
    # A damaged page may hold anything: text for a number, a blob of another length.
    except (sqlite3.Error, *NONSENSE) as error:
        raise RunFileError(f"{path}: cannot be read ({error})") from error
    finally:
        db.close()


NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What Python raises for values that are not what was written."""


def checkpoint(path: Path) -> None:
    """Move what the WAL holds into the file, as far as readers allow."""
    db = writing(path, create=False)
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
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All of it, or none."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk makes SQLite roll back by itself
            db.execute("ROLLBACK")
        raise
