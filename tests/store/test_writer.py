"""What is appended is there, all of it or none, to the last bit."""

import math
import sqlite3
import struct
import subprocess
import sys
import threading
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from equipoise.errors import RunFileError
from equipoise.judging.card import Card
from equipoise.records import Applied, Finding, Reading
from equipoise.store import RunWriter, network, open_run
from tests.conftest import PATIENCE
from tests.store.example_runs import (
    INFO,
    assert_summaries_agree,
    files,
    reading,
    sample,
)

HOLD = """
import sys, time
from equipoise.store import RunWriter
from tests.store.example_runs import INFO
writer = RunWriter(sys.argv[1], INFO)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.eqp"


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


any_bits = st.binary(min_size=8, max_size=8).map(lambda b: struct.unpack("<d", b)[0])
rows = st.lists(
    st.lists(st.floats(width=32) | any_bits, min_size=1, max_size=5),
    min_size=1,
    max_size=5,
)


@given(rows)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_bit_survives(tmp_path: Path, values: list[list[float]]) -> None:
    path = tmp_path / "run.eqp"
    path.unlink(missing_ok=True)
    sites = tuple(map(str, range(len(values))))
    given = Reading(step=3, quantity="q", sites=sites, values=tuple(map(tuple, values)))
    with RunWriter(path, INFO) as writer:
        writer.append([given])
    (back,) = open_run(path).since(0)[0].readings
    assert (back.step, back.quantity, back.sites) == (3, "q", sites)
    flat = [bits(v) for row in values for v in row]
    assert [bits(v) for row in back.values for v in row] == flat


def test_single_precision_takes_half_the_memory(path: Path) -> None:
    with RunWriter(path, INFO) as writer:
        writer.append([reading(0, "q", a=[0.1]), reading(1, "q", a=[0.5])])
    db = sqlite3.connect(path)
    assert db.execute("SELECT length(data) FROM reading").fetchall() == [(8,), (4,)]


def test_an_append_is_all_or_nothing(path: Path) -> None:
    with RunWriter(path, INFO) as writer:
        for step in range(15):
            writer.append(sample(step))
        too_late = Finding(step=2**70, severity="info", code="r", message="m")
        with pytest.raises(OverflowError):
            writer.append(sample(15), findings=[too_late])
        assert open_run(path).steps.tolist() == list(range(15))
        for step in range(15, 40):
            writer.append(sample(step))
    run = open_run(path)
    assert_summaries_agree(run)
    assert run.steps.tolist() == list(range(40))


def test_findings_and_remedies_come_back(path: Path) -> None:
    finding = Finding(
        step=2,
        severity="warn",
        code="r",
        message="m",
        params={"x": 1.5, "n": 2, "why": "because", "on": True},
    )
    applied = Applied(step=3, remedy="temperature", details={"tau": 1.5})
    with RunWriter(path, INFO) as writer:
        writer.append([], findings=[finding], applied=[applied])
    run = open_run(path)
    assert (run.findings, run.applied, run.info) == ([finding], [applied], INFO)


def test_close_leaves_one_file_and_may_be_repeated(path: Path) -> None:
    writer = RunWriter(path, INFO)
    writer.append(sample(0))
    writer.close()
    writer.close()
    assert files(path.parent) == ["run.eqp"]
    assert path.read_bytes()[18] == 1  # not in WAL mode: opens from read-only media
    with pytest.raises(RunFileError, match="closed"):
        writer.append(sample(1))


def test_continues_a_closed_run(path: Path) -> None:
    for start in (0, 20, 40):
        with RunWriter(path, INFO) as writer:
            writer.append([r for s in range(start, start + 20) for r in sample(s)])
    assert open_run(path).steps.tolist() == list(range(60))


def test_info_is_written_once(path: Path) -> None:
    RunWriter(path, INFO).close()
    with RunWriter.resume(path) as writer:
        assert writer.info == INFO


def test_nothing_to_resume(path: Path) -> None:
    with pytest.raises(RunFileError, match="no such run file to resume"):
        RunWriter.resume(path)
    path.touch()
    with pytest.raises(RunFileError, match="nothing in it to resume"):
        RunWriter.resume(path)
    assert files(path.parent) == ["run.eqp"]


def test_a_directory_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="a directory"):
        RunWriter(tmp_path, INFO)


def test_a_file_of_another_kind_is_left_alone(path: Path) -> None:
    path.write_text("precious " * 1000)
    with pytest.raises(RunFileError, match="not a run file"):
        RunWriter(path, INFO)
    assert path.read_text() == "precious " * 1000
    assert files(path.parent) == ["run.eqp"]


def test_readings_cannot_be_changed(path: Path) -> None:
    with RunWriter(path, INFO) as writer:
        writer.append(sample(0))
    db = sqlite3.connect(path)
    for attempt in ("UPDATE reading SET step = 7", "DELETE FROM reading"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            db.execute(attempt)


def test_second_writer_is_refused_with_the_holders_name(path: Path) -> None:
    with RunWriter(path, INFO), pytest.raises(RunFileError, match="already being"):
        RunWriter(path, INFO)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunFileError, match=f"process {holder.pid} on"):
            RunWriter(path, INFO)
    finally:
        holder.kill()
        holder.communicate()
    RunWriter(path, INFO).close()  # the lock of the dead is taken over
    assert files(path.parent) == ["run.eqp"]


def test_a_script_that_just_ends_leaves_one_file(path: Path) -> None:
    code = HOLD.replace("time.sleep(60)", "")
    subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, timeout=PATIENCE
    )
    assert files(path.parent) == ["run.eqp"]


def test_the_wal_stays_bounded_without_a_pause(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "WAL_BYTES", 1 << 20)
    monkeypatch.setattr(network.OpenFile, "_tidy", lambda self: None)
    wal = path.with_name("run.eqp-wal")
    with RunWriter(path, INFO) as writer:
        for step in range(1000):
            writer.append([reading(step, "q", a=[float(step)] * 500)])
        assert wal.stat().st_size < 4 << 20


def test_threads_may_share_a_writer(path: Path) -> None:
    with RunWriter(path, INFO) as writer:
        workers = [
            threading.Thread(
                target=lambda k=k: [writer.append(sample(4 * s + k)) for s in range(25)]
            )
            for k in range(4)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    run = open_run(path)
    assert run.steps.tolist() == list(range(100))
    assert run.summary("norm", level=1)["a"].rows.sum() == 100


def test_nan_is_a_reading(path: Path) -> None:
    with RunWriter(path, INFO) as writer:
        writer.append([reading(0, "q", a=[math.nan, math.inf, -math.inf, -0.0])])
    values = open_run(path).series("q")["a"][1]
    np.testing.assert_array_equal(values, [[math.nan, math.inf, -math.inf, -0.0]])
    assert math.copysign(1, values[0, 3]) == -1


def test_the_latest_card_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.eqp"
    with RunWriter(path, INFO) as writer:
        assert not open_run(path).card
        for step in (1, 2):
            writer.append((), card=Card(step=step, sections={"loss": {"shift": step}}))
            assert open_run(path).card.sections == {"loss": {"shift": step}}
    with RunWriter.resume(path) as writer:
        writer.append(())
    assert open_run(path).card.step == 2
