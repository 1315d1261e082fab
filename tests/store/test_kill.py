"""SIGKILL at random moments: nothing that was acknowledged is ever lost."""

import multiprocessing
import os
import random
import sqlite3
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from equipoise.errors import RunFileError
from equipoise.store import RunWriter, open_run
from tests.conftest import PATIENCE
from tests.store.example_runs import assert_summaries_agree, files
from tests.store.killed_writer import append_until_killed, step_readings

KILLS = 60


@pytest.fixture(scope="module")
def processes():
    """A server that has imported the store once and forks from there: fast starts."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context(
        "forkserver" if "forkserver" in methods else "spawn"
    )
    if "forkserver" in methods:
        context.set_forkserver_preload(["tests.store.killed_writer", "pytest"])
    return context


def acknowledged(acknowledge: Connection) -> list[int]:
    """Return every step the killed writer had time to report."""
    received = b""
    while block := os.read(acknowledge.fileno(), 1 << 16):
        received += block
    whole = len(received) // 8 * 8
    return [int.from_bytes(received[i : i + 8], "little") for i in range(0, whole, 8)]


def killed(processes, path: Path, after: float, *, at_work: bool) -> list[int]:
    """Start a writer, kill it, and return the steps it acknowledged."""
    acknowledge, child_end = processes.Pipe(duplex=False)
    child = processes.Process(target=append_until_killed, args=(str(path), child_end))
    child.start()
    child_end.close()
    if at_work:
        acknowledge.poll(PATIENCE)
    time.sleep(after)
    child.kill()
    child.join()
    return acknowledged(acknowledge)


def assert_is_there(path: Path, steps: list[int]) -> None:
    run = open_run(path)
    recorded = run.steps.tolist()
    assert recorded == list(range(len(recorded)))
    assert set(steps) <= set(recorded)
    news, cursor = [], 0
    while (page := run.since(cursor))[1] != cursor:
        cursor = page[1]
        news += page[0].readings
    assert news == [r for step in recorded for r in step_readings(step)]


def test_kill_at_random_moments(processes, tmp_path: Path) -> None:
    path, rng, total = tmp_path / "run.eqp", random.Random(0), 0
    for kill in range(KILLS):
        at_work = kill % 4 != 0  # every fourth while it is still opening the file
        steps = killed(processes, path, rng.uniform(0, 0.03), at_work=at_work)
        total += len(steps)
        if steps or path.exists():
            check(path, steps, deep=kill % 15 == 14)
    # Three of four were seen at work before they were killed.
    assert total >= 3 * KILLS // 4
    with RunWriter.resume(path) as writer:
        writer.append(step_readings(len(open_run(path).steps)))
    assert files(tmp_path) == ["run.eqp"]
    assert_is_there(path, [])
    assert_summaries_agree(open_run(path))


def check(path: Path, steps: list[int], *, deep: bool) -> None:
    try:
        run = open_run(path)
    except RunFileError:
        assert not steps, "acknowledged, but not readable"
        return
    assert set(steps) <= set(run.steps.tolist())
    if deep:
        assert_is_there(path, steps)
        assert_summaries_agree(run)
        db = sqlite3.connect(path)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        db.close()
