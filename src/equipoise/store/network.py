"""The file a writer has open: the run itself, or its local double behind a network.

A run on a network filesystem: written locally, published as whole snapshots.

Is this path on a network filesystem? SQLite's WAL needs a local one.
"""

import hashlib
import os
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

import equipoise.store.schema as connection
import equipoise.store.schema as schema
from equipoise.errors import RunFileError
from equipoise.store.forks import forget_when_forked, leak
from equipoise.store.housekeeper import Housekeeper

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


TIDY_EVERY_S = 5.0
TIDY_APPENDS = 64
"""Appends after which the housekeeper is woken before its time."""
WAL_BYTES = 64 << 20
"""A WAL longer than this is folded by the writer itself.

It starts again from its beginning only when all of it has been folded; under writes
without a pause the housekeeper never quite gets there, and it would grow for ever.
"""


class LiveFile:
    """An open connection, and the thread that keeps what is behind it in order."""

    def __init__(self, place: Path, *, away: bool, publish_every: float) -> None:
        self._place = place
        self._away = away
        self._publish_every = publish_every
        self._path = live_path(place) if away else place
        self._wal = self._path.with_name(self._path.name + "-wal")
        if away:
            prepare(self._path, place)
        self.db = connection.writing(self._path)
        self._appends = self._published = 0
        self._next = time.monotonic() + publish_every

    def start(self) -> None:
        """Begin to keep order; on a network, show that the run exists."""
        if self._away:
            publish(self._path, self._place)
        every = min(TIDY_EVERY_S, self._publish_every)
        self._housekeeper = Housekeeper(self._tidy, every=every)
        forget_when_forked(self._housekeeper)

    def committed(self) -> None:
        """Note one more append."""
        self._appends += 1
        if self._appends % TIDY_APPENDS == 0:
            self._housekeeper.wake()
            if self._wal.exists() and self._wal.stat().st_size > WAL_BYTES:
                self.db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _tidy(self) -> None:
        connection.checkpoint(self._path)
        due = time.monotonic() >= self._next and self._appends > self._published
        if self._away and due:
            self._published = self._appends
            self._next = time.monotonic() + self._publish_every
            publish(self._path, self._place)

    def rest(self) -> None:
        """Stop keeping order; nothing else touches the file then."""
        self._housekeeper.stop()

    def close(self) -> None:
        """Leave one plain file where the run belongs."""
        connection.fold(self.db)
        if self._away:
            deliver(self._path, self._place)

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
