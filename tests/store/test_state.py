"""Whether a run is live, finished or stopped, and which one is the newest."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from equipoise.records import Reading, RunInfo
from equipoise.store import RunWriter, open_run
from equipoise.store.location import newest

INFO = RunInfo(name="mine", created="2026-11-17T20:00:00+00:00", version="0.1.0")
DYING = """
import os, signal, sys
from equipoise.records import RunInfo
from equipoise.store import RunWriter
RunWriter(sys.argv[1], RunInfo(name="x", created="2026-11-17T20:00:00", version="0"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_is_live_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "mine.eqp"
    with RunWriter(path, INFO) as writer:
        run = open_run(path)
        assert run.state == "live" and run.last_time is None
        before = time.time()
        writer.append([Reading.scalar(0, "loss", 1.0)])
        assert run.last_time is not None and before - 1 < run.last_time < before + 60
    assert run.state == "finished"


def test_a_run_whose_writer_was_killed_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "mine.eqp"
    done = subprocess.run([sys.executable, "-c", DYING, str(path)])
    assert done.returncode == -signal.SIGKILL
    assert open_run(path).state == "stopped"


def test_a_writer_on_another_machine_counts_while_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "mine.eqp"
    RunWriter(path, INFO).close()
    (tmp_path / "mine.eqp.lock").write_text(f"1 not-{socket.gethostname()}\n")
    assert open_run(path).state == "live"
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))
    assert open_run(path).state == "stopped"
    (tmp_path / "mine.eqp.lock").write_text("torn")
    assert open_run(path).state == "stopped"


def test_the_newest_is_the_one_written_last_journal_included(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    with RunWriter(tmp_path / "sweep" / "live.eqp", INFO) as writer:
        RunWriter(tmp_path / "later.eqp", INFO).close()
        past = time.time() - 100
        os.utime(writer.path, (past, past))  # its journal is what grows
        os.utime(tmp_path / "later.eqp", (past + 50, past + 50))
        assert newest(tmp_path) == writer.path
