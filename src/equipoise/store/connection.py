"""Connections to a run file, and what becomes of them when a process forks."""

import ctypes
import os
import sqlite3
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from equipoise.errors import RunFileError

BUSY_S = 10.0


def writing(path: Path) -> sqlite3.Connection:
    """Open for writing: commits reach the operating system at once, the disk later.

    WAL with synchronous=NORMAL loses nothing when the process is killed; after a power
    cut the last seconds may be missing, but the file is whole.
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


class Forkable(Protocol):
    """Something that owns a connection and must forget it in a forked child."""

    def forget(self) -> None: ...


_alive: "weakref.WeakSet[Forkable]" = weakref.WeakSet()


def forget_when_forked(owner: Forkable) -> None:
    """Have ``owner.forget()`` called in every child forked from now on."""
    _alive.add(owner)


def leak(db: sqlite3.Connection) -> None:
    """Keep a connection from ever being closed by this process.

    Closing a connection carried across a fork may checkpoint and remove the parent's
    WAL (sqlite.org/howtocorrupt.html §2.6), and interpreter shutdown closes whatever is
    left: one reference too many prevents both.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))


def _forget_all() -> None:
    for owner in list(_alive):
        owner.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
