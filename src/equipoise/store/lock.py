"""One writer to a run: an OS lock on a file beside it, which also says who holds it.

The lock dies with its process, however that dies, so a stale one is simply taken over;
the process id inside is only for the message.
"""

import contextlib
import errno
import os
import socket
import sys
import time
from pathlib import Path
from typing import Literal

from equipoise.errors import RunFileError

if sys.platform == "win32":
    import msvcrt

    # Windows locks are mandatory: lock a byte past the text, so that it can be read.
    FAR = 1 << 20

    def _try_lock(handle: int) -> None:
        os.lseek(handle, FAR, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

    def _opens(pid: int) -> bool:
        import ctypes

        limited_information = 0x1000
        handle = ctypes.windll.kernel32.OpenProcess(limited_information, False, pid)
        ctypes.windll.kernel32.CloseHandle(handle)
        return bool(handle)
else:
    import fcntl

    def _try_lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def is_alive(pid: int) -> bool:
    """Say whether a process of this machine runs."""
    if sys.platform == "win32":
        return _opens(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's process
    return True


State = Literal["live", "finished", "stopped"]
"""Being written, closed by its writer, or left by a writer that died."""
SILENT = 600
"""Seconds without a write after which a writer on another machine counts as gone."""


def writer_state(run: Path) -> State:
    """Say whether a run is still written, from the file its writer holds.

    The lock itself is not tried: a reader must never be in a writer's way.
    """
    try:
        holder = run.with_name(run.name + ".lock").read_text().split()
    except (OSError, UnicodeDecodeError):
        return "finished"
    if len(holder) != 2 or not holder[0].isdigit():
        return "stopped"
    if holder[1] == socket.gethostname():
        return "live" if is_alive(int(holder[0])) else "stopped"
    return "live" if time.time() - _last_write(run) < SILENT else "stopped"


def _last_write(run: Path) -> float:
    files = (run, run.with_name(run.name + "-wal"))
    return max((f.stat().st_mtime for f in files if f.exists()), default=0.0)


class WriterLock:
    """Held from construction to ``release()``, or to the death of the process."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._path = run.with_name(run.name + ".lock")
        self._handle = self._acquired(run)
        self._sign()

    def _sign(self) -> None:
        os.ftruncate(self._handle, 0)
        os.lseek(self._handle, 0, os.SEEK_SET)
        os.write(self._handle, f"{os.getpid()} {socket.gethostname()}\n".encode())

    def renew(self) -> None:
        """Lock again where the lock file was deleted, with its folder perhaps."""
        if not self._is_current(self._handle):
            old, self._handle = self._handle, self._acquired(self._run)
            os.close(old)
            self._sign()

    def _acquired(self, run: Path) -> int:
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _try_lock(handle)
            except OSError as held:
                if self._is_held(held):
                    os.close(handle)
                    raise RunFileError(self._held_message(run)) from held
            if self._is_current(handle):
                return handle
            os.close(handle)  # the last holder removed it between our open and lock

    def _is_held(self, refusal: OSError) -> bool:
        """Say whether another process has it; without locks, ask the file who wrote it.

        Some network filesystems have no locks. A holder on another machine cannot be
        checked, and counts as running.
        """
        if refusal.errno not in NO_LOCKS:
            return True
        holder = self._path.read_text().split()
        if len(holder) != 2:
            return False
        return holder[1] != socket.gethostname() or is_alive(int(holder[0]))

    def _is_current(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), self._path.stat())
        except FileNotFoundError:
            return False

    def _held_message(self, run: Path) -> str:
        holder = self._path.read_text().split()
        if holder == [str(os.getpid()), socket.gethostname()]:
            return (
                f"{run}: already being written by this process: call .close() on what "
                "writes it, or write to another file"
            )
        who = f"process {holder[0]} on {holder[1]}" if len(holder) == 2 else "another"
        return (
            f"{run}: already being written by {who}; stop that one first, or write to "
            f"another file (if it is long dead, remove {self._path.name})"
        )

    def release(self) -> None:
        """Remove the file and let go: in this order, so that no two ever hold it."""
        if sys.platform != "win32":
            self._path.unlink(missing_ok=True)
        os.close(self._handle)
        if sys.platform == "win32":  # where an open file cannot be removed
            with contextlib.suppress(OSError):
                self._path.unlink()

    def abandon(self) -> None:
        """Let go of a forked copy of the handle; the parent still holds the lock."""
        os.close(self._handle)
