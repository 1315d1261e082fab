"""A run on a network filesystem: written locally, published as whole snapshots."""

import hashlib
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

import equipoise.store.connection as connection
import equipoise.store.schema as schema
from equipoise.errors import RunFileError

EVERY_S = 30.0


def live_path(place: Path) -> Path:
    """Return the local file behind a published one: the same again after a crash."""
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"equipoise-{owner}"
    folder.mkdir(mode=0o700, exist_ok=True)
    key = hashlib.sha256(str(place.resolve()).encode()).hexdigest()[:12]
    return folder / f"{key}-{place.name}"


def prepare(live: Path, place: Path) -> None:
    """Make the local file what the writer should continue from.

    That is the local one a killed writer left, unless the published one went on
    elsewhere meanwhile, or was removed.
    """
    if not place.exists():
        _remove(live)
    elif not live.exists() or _state(live) < _state(place):
        _remove(live)
        shutil.copyfile(place, live)


def _state(path: Path) -> tuple[bool, int]:
    try:
        with connection.reading(path) as db:
            schema.checked_version(db, path)
            return True, schema.last_id(db)
    except RunFileError:
        return False, 0


def publish(live: Path, place: Path) -> None:
    """Replace the published file by a snapshot, in one step for whoever reads it."""
    copy = live.with_name(live.name + ".copy")
    _remove(copy)
    source, target = sqlite3.connect(live), sqlite3.connect(copy)
    try:
        source.backup(target)  # in one go: a consistent moment, whatever is appended
        target.execute("PRAGMA journal_mode = DELETE")
    finally:
        source.close()
        target.close()
    deliver(copy, place)


def deliver(file: Path, place: Path) -> None:
    """Move a finished local file to the network: readers see the old or the new."""
    partial = place.with_name(f".{place.name}.partial")
    shutil.copyfile(file, partial)
    with partial.open("rb+") as stream:
        os.fsync(stream.fileno())
    partial.replace(place)
    _remove(file)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
