"""Forked processes: the child drops the writer it inherited, without closing it.

Closing a connection carried across a fork may fold the parent's WAL under its feet
(sqlite.org/howtocorrupt.html, section 2.6), so the child drops it without closing.
While the process forks no writer is inside SQLite: a lock held there by another thread
would stay locked in the child for good.
"""

import ctypes
import os
import threading
import weakref
from typing import Protocol


class ForkGuard(Protocol):
    """A re-entrant lock."""

    def acquire(self) -> bool: ...

    def release(self) -> None: ...


class Forkable(Protocol):
    """Something that owns a connection."""

    @property
    def guard(self) -> ForkGuard:
        """Held while it works."""
        ...

    def forget(self) -> None:
        """Drop the connection, in the child."""
        ...


_owners: "weakref.WeakSet[Forkable]" = weakref.WeakSet()
_adding = threading.RLock()


def forget_when_forked(owner: Forkable) -> None:
    """Have ``owner.forget()`` called in every child forked from now on."""
    with _adding:
        _owners.add(owner)


def leak(thing: object) -> None:
    """Keep an object alive, interpreter shutdown included."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _before() -> None:
    _adding.acquire()
    for owner in list(_owners):
        owner.guard.acquire()


def _after_in_parent() -> None:
    for owner in list(_owners):
        owner.guard.release()
    _adding.release()


def _after_in_child() -> None:
    for owner in list(_owners):
        owner.forget()
        owner.guard.release()
    _adding.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before,
        after_in_parent=_after_in_parent,
        after_in_child=_after_in_child,
    )
