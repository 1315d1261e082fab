"""Whether a run, or any run of the list, has changed: a word that pages compare.

A page asks once a second, and closes its connection. An open stream for each page would
take one of the six connections that a browser has for all tabs of one board: the
seventh tab would wait for ever.
"""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.web.directory import Directory, signature

LOOK_S = 0.25
"""One look at a file's times serves every page that asks within it."""
MOST_LOOKS = 1000
"""Runs whose latest look is kept."""


@dataclass(slots=True)
class Looks:
    """The last look at each run that some page follows, and at the list of all."""

    directory: Directory
    _last: OrderedDict[Path | None, tuple[float, str]] = field(
        default_factory=OrderedDict
    )

    def word(self, path: Path | None) -> str:
        """Return a word that differs once a run has changed; None: any of the list."""
        at, word = self._last.get(path, (-LOOK_S, ""))
        now = time.monotonic()
        if now - at < LOOK_S:
            return word
        word = self._look(path)
        self._last[path] = now, word
        self._last.move_to_end(path)
        while len(self._last) > MOST_LOOKS:
            self._last.popitem(last=False)
        return word

    def _look(self, path: Path | None) -> str:
        paths = self.directory.paths().values() if path is None else [path]
        state = repr([signature(one) for one in paths])
        return hashlib.blake2s(state.encode(), digest_size=8).hexdigest()
