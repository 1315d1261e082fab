"""Runs on this machine: a few spawned processes, one torch thread each."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from equipoise.lab.running.execution import execute
from equipoise.lab.running.experiment import Task
from equipoise.lab.training.options import Progress

Watcher = Callable[[Task, Progress | None], None]
"""Told of a task's progress, and with None of its end."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A run that did not finish, and the end of what it printed."""

    task: Task
    reason: str


@dataclass
class _Worker:
    """A process that makes one run after another: torch takes seconds to import."""

    process: BaseProcess
    wire: Connection
    task: Task | None = None
    """The run under way."""


def run_local(
    tasks: list[Task], root: Path, *, workers: int, watcher: Watcher
) -> list[Failure]:
    """Make the runs, ``workers`` at a time; return those that failed."""
    waiting, crew = list(reversed(tasks)), list[_Worker]()
    failures: list[Failure] = []
    try:
        while waiting or crew:
            while waiting and len(crew) < workers:
                crew.append(_hired(root))
                _hand(crew[-1], waiting)
            for one in _heard(crew):
                failures += _served(one, root, watcher=watcher, waiting=waiting)
            crew = [one for one in crew if not one.wire.closed]
    finally:
        for one in crew:
            one.process.terminate()
    return failures


def _hired(root: Path) -> _Worker:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_child, args=(root, theirs), daemon=True)
    process.start()
    theirs.close()  # so that our end sees the child's death
    return _Worker(process, ours)


def _hand(one: _Worker, waiting: list[Task]) -> None:
    """Give the worker its next run, or let it go."""
    one.task = waiting.pop() if waiting else None
    one.wire.send(one.task)


def _heard(crew: list[_Worker]) -> list[_Worker]:
    ready = wait([one.wire for one in crew], timeout=1)
    return [one for one in crew if one.wire in ready]


def _served(
    one: _Worker, root: Path, *, watcher: Watcher, waiting: list[Task]
) -> list[Failure]:
    """Take one message: news of a run, its end, or the worker's own end."""
    task = one.task
    try:
        news = one.wire.recv()
    except EOFError:
        one.process.join()
        one.wire.close()
        if task is None:
            return []
        watcher(task, None)
        return [_failure(one, task, root)]
    assert task is not None
    watcher(task, news)
    if news is None:
        _hand(one, waiting)
    return []


def _failure(one: _Worker, task: Task, root: Path) -> Failure:
    log = root / task.folder / "log.txt"
    said = log.read_text().strip().splitlines() if log.is_file() else []
    last = said[-1] if said else "no output"
    code = one.process.exitcode
    return Failure(task=task, reason=f"exit code {code}: {last} (see {log})")


def _child(root: Path, wire: Connection) -> None:
    """Make runs until there are none left; an error ends the process and is its log."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    while (task := wire.recv()) is not None:
        folder = root / task.folder
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("a", buffering=1) as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
            execute(task, root, wire.send)
        wire.send(None)


def _die_with_parent() -> None:
    """A killed sweep leaves no orphans: they would hold run files it resumes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
