"""The runs of a directory: found, opened and judged, each anew once it changed."""

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.errors import EquipoiseError, RunFileError
from equipoise.report.page_model import is_large, judged
from equipoise.report.run_list import run_row
from equipoise.store import Run, open_run
from equipoise.store.location import SUFFIX, run_files

RESCAN_S = 1.0
OPEN_RUNS, OPEN_LARGE = 16, 2
"""Run files of which something is kept in memory, and large ones among them.

The rules keep their latest readings: 70 MB of 96 layers with 32 heads.
"""
Signature = tuple[int, ...]


def signature(path: Path) -> Signature:
    """Return what changes when a run is written, or another takes its name.

    Times and sizes of file and WAL, and which file it is.
    """
    found: list[int] = []
    for one in (path, path.with_name(f"{path.name}-wal")):
        try:
            stat = one.stat()
        except OSError:
            found += [0, 0, 0]
        else:
            found += [stat.st_ino, stat.st_mtime_ns, stat.st_size]
    return tuple(found)


@dataclass(slots=True)
class _Opened:
    signature: Signature
    run: Run

    def is_still(self, now: Signature) -> bool:
        """Whether the file holds the run that was opened, perhaps with more in it."""
        if self.signature != now:
            if self.run.identity_now() != self.run.identity:
                return False
            self.signature = now
        return True


@dataclass(slots=True)
class _Judged:
    signature: Signature
    row: dict[str, Any]


@dataclass(slots=True)
class Directory:
    """Runs under one directory, by key: the path inside it, without its suffix."""

    root: Path
    _paths: dict[str, Path] = field(default_factory=dict)
    _scanned: float = -RESCAN_S
    _open: OrderedDict[str, _Opened] = field(default_factory=OrderedDict)
    _judged: dict[str, _Judged] = field(default_factory=dict)
    _guard: threading.RLock = field(default_factory=threading.RLock)
    _judging: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="judge")
    )
    _work: Future[object] | None = None

    def paths(self) -> dict[str, Path]:
        """Return every run's key and file, the newest first; scanned once a second."""
        with self._guard:
            if time.monotonic() - self._scanned >= RESCAN_S:
                self._paths = dict(self._found())
                self._scanned = time.monotonic()
            return self._paths

    def _found(self) -> list[tuple[str, Path]]:
        inside = self.root.resolve()
        if not inside.is_dir():
            return []
        files = run_files(inside, recursive=True)
        # A link that leads out of the directory is not ours to show.
        own = [p for p in files if p.resolve().is_relative_to(inside)]
        return [(p.relative_to(inside).as_posix()[: -len(SUFFIX)], p) for p in own]

    def path(self, key: str) -> Path:
        """Return the file of a run that was found; no other path can be asked for."""
        found = self.paths().get(key)
        if found is None:
            raise RunFileError(f"no run {key!r} in {self.root}")
        return found

    def run(self, key: str) -> Run:
        """Return the run, opened once while it is in use and not replaced."""
        path = self.path(key)
        now = signature(path)
        with self._guard:
            known = self._open.get(key)
        if known is not None and known.is_still(now):
            with self._guard:
                self._open[key] = known
                self._open.move_to_end(key)
            return known.run
        run = open_run(path)
        with self._guard:
            self._open[key] = _Opened(now, run)
            self._open.move_to_end(key)
            large = [k for k, one in self._open.items() if is_large(one.run)]
            for old in large[:-OPEN_LARGE] or list(self._open)[:-OPEN_RUNS]:
                del self._open[old]
        return run

    def row(self, key: str, *, judge: bool = False) -> dict[str, Any]:
        """Return a run's line in the list; its verdict is None until it was judged."""
        path = self.path(key)
        now = signature(path)
        known = self._judged.get(key)
        if known is not None and (known.signature == now or not judge):
            return {**known.row, "stale": known.signature != now}
        if not judge:
            return {"key": key, "label": key, "verdict": None, "stale": True}
        row = self._read(key)
        self._judged[key] = _Judged(now, row)
        return {**row, "stale": False}

    def _read(self, key: str) -> dict[str, Any]:
        try:
            run = self.run(key)
            return {"key": key, **run_row(run, judged(run))}
        except EquipoiseError as error:
            return {"key": key, "label": key, "trouble": str(error), "verdict": None}

    def judge(self, *, seconds: float) -> None:
        """Bring lines of the list up to date, in a thread, and wait so long for it.

        A large file takes longer; it goes on, and the next call waits again.
        """
        end = time.monotonic() + seconds
        while (key := self.unjudged()) is not None:
            with self._guard:
                if self._work is None or self._work.done():
                    self._work = self._judging.submit(self.row, key, judge=True)
                work = self._work
            try:
                work.result(timeout=max(0.0, end - time.monotonic()))
            except TimeoutError:
                return

    def unjudged(self) -> str | None:
        """Return the newest run whose line is not up to date."""
        for key, path in self.paths().items():
            known = self._judged.get(key)
            if known is None or known.signature != signature(path):
                return key
        return None
