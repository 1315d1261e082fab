"""The file a writer has open: the run itself, or its local double behind a network."""

import time
from pathlib import Path

import equipoise.store.connection as connection
import equipoise.store.snapshot as snapshot
from equipoise.store.forks import forget_when_forked, leak
from equipoise.store.housekeeper import Housekeeper

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
        self._path = snapshot.live_path(place) if away else place
        self._wal = self._path.with_name(self._path.name + "-wal")
        if away:
            snapshot.prepare(self._path, place)
        self.db = connection.writing(self._path)
        self._appends = self._published = 0
        self._next = time.monotonic() + publish_every

    def start(self) -> None:
        """Begin to keep order; on a network, show that the run exists."""
        if self._away:
            snapshot.publish(self._path, self._place)
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
            snapshot.publish(self._path, self._place)

    def rest(self) -> None:
        """Stop keeping order; nothing else touches the file then."""
        self._housekeeper.stop()

    def close(self) -> None:
        """Leave one plain file where the run belongs."""
        connection.fold(self.db)
        if self._away:
            snapshot.deliver(self._path, self._place)

    def abort(self) -> None:
        """Close a file that turned out not to be ours, as it is."""
        self.db.close()

    def forget(self) -> None:
        """Drop the connection in a forked child, without closing it."""
        leak(self.db)
