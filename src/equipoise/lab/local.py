"""Runs on this machine: one spawned process each, one torch thread each."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from equipoise.lab.execution import execute
from equipoise.lab.experiment import Task
from equipoise.lab.training import Progress

Watcher = Callable[[Task, Progress | None], None]
"""Told of a task's progress, and with None of its end."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A run that did not finish, and the end of what it printed."""

    task: Task
    reason: str


@dataclass
class _Running:
    task: Task
    process: BaseProcess
    news: Connection
    open: bool = field(default=True)


def run_local(
    tasks: list[Task], root: Path, *, workers: int, watcher: Watcher
) -> list[Failure]:
    """Make the runs, ``workers`` at a time; return those that failed."""
    waiting, running = list(reversed(tasks)), list[_Running]()
    failures: list[Failure] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_started(waiting.pop(), root))
            _listen(running, watcher)
            for one in [r for r in running if not r.process.is_alive() and not r.open]:
                running.remove(one)
                failures += _ended(one, root, watcher)
    finally:
        for one in running:
            one.process.terminate()
    return failures


def _started(task: Task, root: Path) -> _Running:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_child, args=(task, root, theirs), daemon=True)
    process.start()
    theirs.close()  # so that our end sees the child's death
    return _Running(task, process, ours)


def _listen(running: list[_Running], watcher: Watcher) -> None:
    by_end = {r.news: r for r in running if r.open}
    for end in wait([*by_end, *(r.process.sentinel for r in running)], timeout=1):
        if isinstance(end, Connection):
            one = by_end[end]
            try:
                watcher(one.task, end.recv())
            except EOFError:
                one.open = False
                one.process.join()


def _ended(one: _Running, root: Path, watcher: Watcher) -> list[Failure]:
    watcher(one.task, None)
    if one.process.exitcode == 0:
        return []
    log = root / one.task.folder / "log.txt"
    said = log.read_text().strip().splitlines() if log.is_file() else []
    last = said[-1] if said else "no output"
    code = one.process.exitcode
    return [Failure(task=one.task, reason=f"exit code {code}: {last} (see {log})")]


def _child(task: Task, root: Path, news: Connection) -> None:
    """Make one run in a process of its own; what it prints goes to log.txt."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    folder = root / task.folder
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a", buffering=1) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
        execute(task, root, news.send)


def _die_with_parent() -> None:
    """A killed sweep leaves no orphans: they would hold run files it resumes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
