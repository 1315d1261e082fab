"""A line on the terminal while something takes longer than two seconds.

It goes to stderr and only to a terminal, so pipes and logs never see it.
"""

import sys
import threading
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

DELAY = 2.0
"""Seconds before anything is shown: what is quick needs no bar."""


class Spinner:
    """Shows what is under way, with a bar where the number of parts is known."""

    def __init__(self, doing: str, *, total: int | None = None) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(doing, total=total)
        self._timer = threading.Timer(DELAY, self._start)
        self._timer.daemon = True
        self._lock, self._shown, self._over = threading.Lock(), False, False

    def _start(self) -> None:
        with self._lock:  # the end may come at the same moment
            if not self._over:
                self._shown = True
                self._progress.start()

    def now(self, doing: str) -> None:
        """Name the next part."""
        self._progress.update(self._task, description=doing)

    def advance(self, done: int = 1) -> None:
        """Count parts that are done."""
        self._progress.advance(self._task, done)

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._timer.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the line off; what is printed next stands alone."""
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._shown:  # rich prints a line at the end of what never began
                self._progress.stop()


working = Spinner
"""Show what is done from the third second on, until the block ends."""
