"""On a network filesystem: a local file, published as whole snapshots."""

import errno
import logging
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from equipoise.errors import RunFileError
from equipoise.store import RunWriter, lock, network, open_run
from equipoise.store.network import on_network
from tests.conftest import PATIENCE
from tests.store.example_runs import INFO, assert_summaries_agree, files, sample

TABLE = """\
/dev/sda1 / ext4 rw,relatime 0 0
server:/export /data nfs4 rw,vers=4.2 0 0
/dev/sdb1 /data/scratch xfs rw 0 0
//server/my\\040share /mnt/my\\040share cifs rw 0 0
me@host:/ /home/me/far fuse.sshfs rw 0 0
/dev/sdc1 /media/stick fuseblk rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me/runs/a.eqp", False),
        ("/data/runs/a.eqp", True),
        ("/data/scratch/a.eqp", False),
        ("/database/a.eqp", False),
        ("/mnt/my share/a.eqp", True),
        ("/home/me/far/a.eqp", True),
        ("/media/stick/a.eqp", False),
    ],
)
def test_the_table_of_mounts_is_read(tmp_path: Path, path: str, expected: bool) -> None:
    table = tmp_path / "mounts"
    table.write_text(TABLE)
    assert on_network(Path(path), table) is expected


def test_without_a_table_a_path_is_local(tmp_path: Path) -> None:
    assert not on_network(tmp_path / "run.eqp", tmp_path / "absent")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path on the "network", with a temporary directory of its own."""
    local = tmp_path / "local"
    local.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(local))
    monkeypatch.setenv("TMPDIR", str(local))
    return tmp_path / "far" / "run.eqp"


def remote_writer(place: Path, *, publish_every: float = 3600.0) -> RunWriter:
    return RunWriter(place, INFO, network=True, publish_every=publish_every)


def is_in_wal_mode(path: Path) -> bool:
    return path.read_bytes()[18] == 2


def test_detection_decides(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.store.writer.on_network", lambda path: True)
    with RunWriter(place, INFO):
        assert network.local_path(place).exists()
    assert not network.local_path(place).exists()


def test_readers_see_snapshots_and_in_the_end_everything(place: Path) -> None:
    with remote_writer(place, publish_every=0.05) as writer:
        run = open_run(place)  # there from the first moment
        writer.append(sample(0))
        deadline = time.monotonic() + PATIENCE
        while not len(run.steps) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert run.steps.tolist() == [0]
        assert not is_in_wal_mode(place)
        assert files(place.parent) == ["run.eqp", "run.eqp.lock"]
        writer.append(sample(1))
    assert open_run(place).steps.tolist() == [0, 1]
    assert files(place.parent) == ["run.eqp"]
    assert files(network.local_path(place).parent) == []


KILLED = """
import os, sys
from equipoise.store import RunWriter
from tests.store.example_runs import INFO, sample
writer = RunWriter(sys.argv[1], INFO, network=True, publish_every=3600)
for step in range(20):
    writer.append(sample(step))
os._exit(9)
"""


def test_a_killed_writer_resumes_from_its_local_file(place: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(place)], timeout=PATIENCE)
    assert not len(open_run(place).steps)  # only the first snapshot was published
    with remote_writer(place) as writer:
        writer.append(sample(20))
    run = open_run(place)
    assert run.steps.tolist() == list(range(21))
    assert_summaries_agree(run)


def test_what_went_on_elsewhere_wins(place: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(place)], timeout=PATIENCE)
    place.unlink()
    with RunWriter(place, INFO, network=False) as other:  # as another machine would
        for step in range(100, 130):
            other.append(sample(step))
    with remote_writer(place):
        pass
    assert open_run(place).steps.tolist() == list(range(100, 130))


def test_a_removed_run_starts_anew(place: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(place)], timeout=PATIENCE)
    place.unlink()
    with remote_writer(place) as writer:
        writer.append(sample(7))
    assert open_run(place).steps.tolist() == [7]


def test_a_broken_local_file_is_replaced(place: Path) -> None:
    with remote_writer(place) as writer:
        writer.append(sample(0))
    network.local_path(place).write_text("torn")
    with remote_writer(place) as writer:
        writer.append(sample(1))
    assert open_run(place).steps.tolist() == [0, 1]


def test_an_absent_server_is_logged_and_tried_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish, failures = network.publish, []

    def fail_once(live: Path, to: Path) -> None:
        if len(failures) < 1:
            failures.append(to)
            raise OSError(errno.EHOSTDOWN, "host is down")
        publish(live, to)

    with caplog.at_level(logging.WARNING, "equipoise"):
        writer = remote_writer(place, publish_every=0.02)
        monkeypatch.setattr(network, "publish", fail_once)
        deadline = time.monotonic() + PATIENCE
        for step in range(10_000):
            writer.append(sample(step))
            time.sleep(0.01)
            if len(open_run(place).steps) or time.monotonic() > deadline:
                break
    assert len(open_run(place).steps)
    assert "host is down" in caplog.text
    writer.close()


def test_a_snapshot_is_tried_until_it_is_there_and_then_no_more(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No append follows: an absent server is asked again all the same."""
    tried = []

    def fail_once(live: Path, to: Path) -> None:
        tried.append(to)
        if len(tried) == 1:
            raise OSError(errno.EHOSTDOWN, "host is down")

    with remote_writer(place, publish_every=1e6) as writer:
        monkeypatch.setattr(network, "publish", fail_once)
        writer.append(sample(0))
        for _ in range(4):
            with writer._file._housekeeper.guard, suppress(OSError):
                writer._file._next = 0.0
                writer._file._tidy()
    assert len(tried) == 2


def refuse_to_lock(handle: int) -> None:
    raise OSError(errno.ENOLCK, "no locks available")


def test_where_files_cannot_be_locked_the_holder_is_asked(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_try_lock", refuse_to_lock)
    with RunWriter(place, INFO), pytest.raises(RunFileError, match="by this process"):
        RunWriter(place, INFO)
    note = place.with_name("run.eqp.lock")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    note.write_text(f"{dead.pid} {socket.gethostname()}\n")
    RunWriter(place, INFO).close()
    note.write_text("12345 elsewhere\n")
    with pytest.raises(RunFileError, match="process 12345 on elsewhere"):
        RunWriter(place, INFO)
    note.write_text("")  # its writer was killed before it could say who it was
    RunWriter(place, INFO).close()


def test_a_process_of_another_user_counts_as_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    assert lock.is_alive(1)


def test_snapshots_are_whole_databases(place: Path) -> None:
    with remote_writer(place, publish_every=0.01) as writer:
        for step in range(150):
            writer.append(sample(step))
            steps = open_run(place).steps
            assert steps.tolist() == list(range(len(steps)))
    db = sqlite3.connect(place)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
