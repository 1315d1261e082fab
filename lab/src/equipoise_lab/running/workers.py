"""Workers that make a sweep's runs: processes of this machine, or a Ray cluster.

What is finished is not made again. A local worker is a spawned process with one torch
thread; machines of a cluster need not share a disk.
"""

import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from equipoise.errors import MissingExtraError
from equipoise_lab.training.options import TrainingProgress
from equipoise_lab.training.trainer import Listener


class Job(Protocol):
    """One run to be made; paths are below the sweep's folder."""

    @property
    def name(self) -> str: ...

    @property
    def result(self) -> Path:
        """Written last: where it is, the run is complete."""

    @property
    def log(self) -> Path:
        """What the run printed."""
        return self.result.with_name("log.txt")


Make = Callable[[Any, Path, Listener | None], object]
"""A job, the sweep's folder and a listener → the run's files. Spawned processes and
clusters get it by its name, so it belongs to a module."""
Watcher = Callable[[Any, TrainingProgress | None], None]
"""Called with a job's progress, and with None at its end."""
Where = Literal["local", "ray"]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A run that did not finish, and the end of what it printed."""

    task: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    """Which of a sweep's runs are finished."""

    done: list[Any]
    left: list[Any]


def standing(jobs: Sequence[Job], root: Path) -> SweepStatus:
    """Return which jobs have their result under ``root``."""
    finished = {job.result: (root / job.result).is_file() for job in jobs}
    return SweepStatus(
        done=[job for job in jobs if finished[job.result]],
        left=[job for job in jobs if not finished[job.result]],
    )


def run_jobs(
    jobs: Sequence[Job],
    root: Path,
    make: Make,
    *,
    on: Where = "local",
    workers: int | None = None,
    watcher: Watcher | None = None,
) -> list[Failure]:
    """Make every run that is not finished; return those that failed.

    Args:
        jobs: The sweep.
        root: Its folder.
        make: Makes one of them.
        on: ``local`` processes, or the Ray cluster that ``ray.init`` finds.
        workers: Local processes at a time; one per core unless given.
        watcher: Called with progress and ends.
    """
    root.mkdir(parents=True, exist_ok=True)
    left, informed = standing(jobs, root).left, watcher or _ignore
    if on == "ray":
        return run_on_ray(left, root, make, watcher=informed)
    count = workers or os.cpu_count() or 1
    return run_local(left, root, make, workers=count, watcher=informed)


def _ignore(job: Job, progress: TrainingProgress | None) -> None:
    pass


@dataclass
class _Worker:
    """A process that makes one run after another: torch takes seconds to import."""

    process: BaseProcess
    wire: Connection
    job: Job | None = None
    """The run under way."""


def run_local(
    jobs: Sequence[Job], root: Path, make: Make, *, workers: int, watcher: Watcher
) -> list[Failure]:
    """Make the runs, ``workers`` at a time; return those that failed."""
    waiting, crew = list(reversed(jobs)), list[_Worker]()
    failures: list[Failure] = []
    try:
        while waiting or crew:
            while waiting and len(crew) < workers:
                crew.append(_started(root, make))
                _assign(crew[-1], waiting)
            for one in _ready(crew):
                failures += _served(one, root, watcher=watcher, waiting=waiting)
            crew = [one for one in crew if not one.wire.closed]
    finally:
        for one in crew:
            one.process.terminate()
    return failures


def _started(root: Path, make: Make) -> _Worker:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_child, args=(root, make, theirs), daemon=True)
    process.start()
    theirs.close()  # so that our end sees the child's death
    return _Worker(process, ours)


def _assign(one: _Worker, waiting: list[Job]) -> None:
    """Give the worker its next run, or let it go."""
    one.job = waiting.pop() if waiting else None
    one.wire.send(one.job)


def _ready(crew: list[_Worker]) -> list[_Worker]:
    ready = wait([one.wire for one in crew], timeout=1)
    return [one for one in crew if one.wire in ready]


def _served(
    one: _Worker, root: Path, *, watcher: Watcher, waiting: list[Job]
) -> list[Failure]:
    """Take one message: news of a run, its end, or the worker's own end."""
    job = one.job
    try:
        news = one.wire.recv()
    except EOFError:
        one.process.join()
        one.wire.close()
        if job is None:
            return []
        watcher(job, None)
        return [_failure(one, job, root)]
    assert job is not None
    watcher(job, news)
    if news is None:
        _assign(one, waiting)
    return []


def _failure(one: _Worker, job: Job, root: Path) -> Failure:
    log = root / job.log
    printed = log.read_text().strip().splitlines() if log.is_file() else []
    last = printed[-1] if printed else "no output"
    code = one.process.exitcode
    return Failure(task=job, reason=f"exit code {code}: {last} (see {log})")


def _child(root: Path, make: Make, wire: Connection) -> None:
    """Make runs until there are none left; an error ends the process and is its log."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    while (job := wire.recv()) is not None:
        (root / job.log).parent.mkdir(parents=True, exist_ok=True)
        with (root / job.log).open("a", buffering=1) as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
            make(job, root, wire.send)
        wire.send(None)


def _die_with_parent() -> None:
    """A killed sweep leaves no orphans: they would hold run files it resumes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def run_on_ray(
    jobs: Sequence[Job], root: Path, make: Make, *, watcher: Watcher
) -> list[Failure]:
    """Make the runs on the cluster ``ray.init`` finds; bring their files home."""
    ray = _ray()
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    remote = ray.remote(num_cpus=1, max_retries=1)(_remote)
    under_way = {remote.remote(job, make): job for job in jobs}
    failures: list[Failure] = []
    while under_way:
        ready, _ = ray.wait(list(under_way), num_returns=1)
        job = under_way.pop(ready[0])
        try:
            _bring_home(ray.get(ready[0]), root)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            failures.append(Failure(task=job, reason=reason))
        watcher(job, None)
    return failures


def _remote(job: Job, make: Make) -> dict[Path, bytes]:
    """Return every file the run left, the one that says it is complete last."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        make(job, root, None)
        files = sorted(p.relative_to(root) for p in root.rglob("*") if p.is_file())
        files.sort(key=lambda path: path == job.result)
        return {path: (root / path).read_bytes() for path in files}


def _bring_home(files: dict[Path, bytes], root: Path) -> None:
    for path, content in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(f".{place.name}")
        draft.write_bytes(content)
        draft.rename(place)


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'running on Ray needs ray: pip install "equipoise[ray]"'
        ) from error
    return ray
