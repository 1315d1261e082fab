"""The background thread that does the slow part of writing, for a run file.

The training loop never waits for a disk.
"""

import logging
import sqlite3
import threading
from collections.abc import Callable

log = logging.getLogger("equipoise")


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
