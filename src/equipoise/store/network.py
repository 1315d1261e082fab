"""A run on a network filesystem: written to a local file, published as snapshots.

SQLite's WAL needs a local filesystem. ``OpenFile`` is the file a writer has open: the
run itself where its path is local, otherwise the local file behind the published one.
"""

import hashlib
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from equipoise.errors import RunFileError
from equipoise.store.forks import forget_when_forked, leak
from equipoise.store.schema import (
    checked_version,
    checkpoint,
    fold,
    last_id,
    reading,
    writing,
)

EVERY_S = 30.0
log = logging.getLogger("equipoise")


def local_path(place: Path) -> Path:
    """Return the local file behind a published one: the same again after a crash."""
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"equipoise-{owner}"
    folder.mkdir(mode=0o700, exist_ok=True)
    key = hashlib.sha256(str(place.resolve()).encode()).hexdigest()[:12]
    return folder / f"{key}-{place.name}"


def prepare(local: Path, place: Path) -> None:
    """Make the local file what the writer should continue from.

    That is the local one a killed writer left, unless the published one went on
    elsewhere meanwhile, or was removed.
    """
    if not place.exists():
        _remove(local)
    elif not local.exists() or _state(local) < _state(place):
        _remove(local)
        shutil.copyfile(place, local)


def _state(path: Path) -> tuple[bool, int]:
    try:
        with reading(path) as db:
            checked_version(db, path)
            return True, last_id(db)
    except RunFileError:
        return False, 0


def publish(local: Path, place: Path) -> None:
    """Replace the published file by a snapshot, in one step for its readers."""
    copy = local.with_name(local.name + ".copy")
    _remove(copy)
    source, target = sqlite3.connect(local), sqlite3.connect(copy)
    try:
        source.backup(target)  # in one go: a consistent moment, whatever is appended
        target.execute("PRAGMA journal_mode = DELETE")
    finally:
        source.close()
        target.close()
    deliver(copy, place)


def deliver(file: Path, place: Path) -> None:
    """Move a finished local file to the network: readers see the old or the new."""
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}.partial")
    shutil.copyfile(file, partial)
    with partial.open("rb+") as stream:
        os.fsync(stream.fileno())
    partial.replace(place)
    _remove(file)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another at the same place; None if it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


TIDY_EVERY_S = 5.0
TIDY_APPENDS = 64
"""Appends after which the housekeeper is woken before its time."""
WAL_BYTES = 64 << 20
"""A WAL longer than this is folded by the writer itself.

It starts again from its beginning only when all of it has been folded; under writes
without a pause the housekeeper never quite gets there, and it would grow without limit.
"""


class Housekeeper:
    """Calls a task now and then, and whenever it is woken."""

    def __init__(self, task: Callable[[], None], *, every: float) -> None:
        self._task = task
        self._every = every
        self._wake = threading.Event()
        self._stopped = False
        self.guard = threading.RLock()
        """Held while the task runs."""
        self._thread = threading.Thread(
            target=self._work, name="equipoise-store", daemon=True
        )
        self._thread.start()

    def wake(self) -> None:
        """Have the task called soon."""
        self._wake.set()

    def stop(self) -> None:
        """Return when the task has ended for good."""
        self._stopped = True
        self._wake.set()
        self._thread.join()

    def forget(self) -> None:
        """Be still in a forked child, where the thread does not exist."""
        self._stopped = True

    def _work(self) -> None:
        while not self._stopped:
            self._wake.wait(self._every)
            self._wake.clear()
            with self.guard:
                if not self._stopped:
                    self._attempt()

    def _attempt(self) -> None:
        """Try; a full disk or an absent server now may be a good one next time."""
        try:
            self._task()
        except (OSError, sqlite3.Error) as error:
            log.warning("equipoise: the run file is not up to date: %s", error)


class OpenFile:
    """An open connection, and the thread that keeps what is behind it in order."""

    def __init__(self, run: Path, *, remote: bool, publish_every: float) -> None:
        self._published_path = run
        self._remote = remote
        self._publish_every = publish_every
        self._path = local_path(run) if remote else run
        self._wal = self._path.with_name(self._path.name + "-wal")
        if remote:
            prepare(self._path, run)
        self.db = writing(self._path)
        self._identity = _identity(self._path)
        self._appends = self._published = 0
        self._next = time.monotonic() + publish_every

    def start(self) -> None:
        """Start the background thread; on a network, publish the first snapshot."""
        if self._remote:
            publish(self._path, self._published_path)
        every = min(TIDY_EVERY_S, self._publish_every)
        self._housekeeper = Housekeeper(self._tidy, every=every)
        forget_when_forked(self._housekeeper)

    def is_lost(self) -> bool:
        """Say whether the file was deleted, moved or replaced under our feet.

        On POSIX, SQLite would go on writing into a file that has no name any more.
        """
        places = (self._path, self._wal)
        return _identity(self._path) != self._identity or not all(
            place.exists() for place in places
        )

    def write_again(self) -> None:
        """Make the file anew, with all that was committed: our connection has it."""
        if self._path.exists() and self._path.stat().st_size:
            if _identity(self._path) != self._identity:
                raise RunFileError(
                    f"{self._path}: replaced by another file while it was written"
                )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        copy = self._path.with_name(f".{self._path.name}.again")
        _remove(copy)
        target = sqlite3.connect(copy)
        try:
            self.db.backup(target)
        finally:
            target.close()
        copy.replace(self._path)
        self._identity = _identity(self._path)
        # Closed before the new one is opened: SQLite removes a WAL by its name.
        self.db.close()
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self.db = writing(self._path)

    def committed(self) -> None:
        """Note one more append."""
        self._appends += 1
        if self._appends % TIDY_APPENDS == 0:
            self._housekeeper.wake()
            if self._wal.exists() and self._wal.stat().st_size > WAL_BYTES:
                self.db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _tidy(self) -> None:
        checkpoint(self._path)
        due = time.monotonic() >= self._next and self._appends > self._published
        if self._remote and due:
            appends = self._appends
            self._next = time.monotonic() + self._publish_every
            publish(self._path, self._published_path)
            self._published = appends  # not before: what failed is due again

    def stop_thread(self) -> None:
        """Stop the background thread; nothing else touches the file then."""
        self._housekeeper.stop()

    def close(self) -> None:
        """Leave one plain file where the run belongs."""
        fold(self.db)
        if self._remote:
            deliver(self._path, self._published_path)

    def abort(self) -> None:
        """Close a file that turned out not to be ours, as it is."""
        self.db.close()

    def forget(self) -> None:
        """Drop the connection in a forked child, without closing it."""
        leak(self.db)


MOUNTS = Path("/proc/mounts")

NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs",
    "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip
LOCAL_FUSE = {"fuse.ext4", "fuse.lxcfs", "fuse.ntfs-3g", "fuseblk"}


def on_network(path: Path, mounts: Path = MOUNTS) -> bool:
    """Say whether the path lies, or would lie, on a network filesystem.

    Known on Linux, from its table of mounts, and on Windows for ``//server/share``;
    elsewhere pass ``network=True`` to the writer.
    """
    if path.drive.startswith(("\\\\", "//")):
        return True
    if not mounts.exists():
        return False
    kind = _kind(path.resolve(), mounts.read_text())
    return kind in NETWORK or (kind.startswith("fuse") and kind not in LOCAL_FUSE)


def _kind(path: Path, table: str) -> str:
    """Return the type of the filesystem with the longest mount point above the path."""
    above = {path, *path.parents}
    rows = (line.split() for line in table.splitlines())
    found = [
        (len(point), n, kind)
        for n, (_, point, kind, *_) in enumerate(rows)
        if Path(_plain(point)) in above
    ]
    return max(found)[2] if found else ""


def _plain(point: str) -> str:
    r"""Return a mount point as a path: the table writes a space as ``\040``."""
    return point.replace(r"\040", " ").replace(r"\011", "\t")
