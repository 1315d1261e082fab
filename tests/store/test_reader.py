"""Reading: while it is written, by cursor, across layouts, and with clear refusals."""

import threading
from pathlib import Path

import numpy as np
import pytest

from equipoise.errors import InputError, RunFileError
from equipoise.records import Finding, Reading
from equipoise.store import RunWriter, open_run, summaries
from tests.store.example_runs import INFO, reading, sample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.eqp"


def test_series_have_steps_and_values(path: Path) -> None:
    with RunWriter(path, INFO) as writer:
        for step in (0, 5, 10):
            writer.append(sample(step))
    run = open_run(path)
    assert run.quantities == ["loss", "norm", "theta"]
    steps, values = run.series("theta")["a"]
    assert steps.tolist() == [0, 5, 10] and values.shape == (3, 3)
    assert run.series("norm")["b"][1].shape == (3,)
    assert list(run.series("norm", "b")) == ["b"]
    assert [end.step for end in run.ends("norm")] == [0, 10]


def test_longer_than_a_block(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "ROWS_AT_ONCE", 100)
    with RunWriter(path, INFO) as writer:
        writer.append([Reading.scalar(s, "loss", s / 3) for s in range(450)])
    steps, values = open_run(path).series("loss")[""]
    np.testing.assert_array_equal(steps, np.arange(450))
    np.testing.assert_array_equal(values, np.arange(450) / 3)


def test_sites_may_come_and_go(path: Path) -> None:
    with RunWriter(path, INFO) as writer:
        writer.append([reading(0, "q", a=[1], b=[2])])
        writer.append([reading(1, "q", b=[3])])
        writer.append([reading(2, "q", b=[4, 5], a=[6])])
    series = open_run(path).series("q")
    assert series["a"][0].tolist() == [0, 2] and series["a"][1].tolist() == [1, 6]
    np.testing.assert_array_equal(series["b"][1], [[2, np.nan], [3, np.nan], [4, 5]])
    assert open_run(path).summary("q")["b"].high.tolist() == [2, 3, 5]


def test_a_step_written_again_shows_what_was_written_last(path: Path) -> None:
    with RunWriter(path, INFO) as writer:
        for step in (0, 1, 2, 3):
            writer.append([Reading.scalar(step, "loss", step)])
        for step in (2, 3, 4):  # resumed from the checkpoint of step 1
            writer.append([Reading.scalar(step, "loss", 10 * step)])
    steps, values = open_run(path).series("loss")[""]
    assert steps.tolist() == [0, 1, 2, 3, 4]
    assert values.tolist() == [0, 1, 20, 30, 40]


def test_a_cursor_returns_each_record_once(path: Path) -> None:
    finding = Finding(step=1, severity="info", code="r", message="m")
    with RunWriter(path, INFO) as writer:
        writer.append(sample(0))
        run = open_run(path)
        news, cursor = run.since(0)
        assert len(news.readings) == 3 and not news.findings
        assert run.since(cursor)[0].readings == [] and run.since(cursor)[1] == cursor
        writer.append(sample(1), findings=[finding])
        writer.append(sample(2))
        seen = []
        while (page := run.since(cursor, limit=2))[1] != cursor:
            news, cursor = page
            seen += [r.step for r in news.readings] + [f.code for f in news.findings]
    assert seen == [1, 1, 1, "r", 2, 2, 2] or sorted(map(str, seen)) == list("111222r")


def test_readable_while_written(path: Path) -> None:
    """Whatever moment a reader looks, it sees whole appends in order."""
    writer = RunWriter(path, INFO)
    done = threading.Event()

    def write() -> None:
        for step in range(400):
            writer.append(sample(step))
        done.set()

    worker = threading.Thread(target=write)
    run, looks = open_run(path), 0
    worker.start()
    while not done.is_set():
        steps = run.steps
        assert steps.tolist() == list(range(len(steps)))
        news, _ = run.since(0)
        assert len(news.readings) % 3 == 0
        if "loss" in run.quantities:
            summary = run.summary("loss", level=2)[""]
            assert summary.rows.sum() >= len(steps)
        looks += 1
    worker.join()
    writer.close()
    assert looks > 3 and len(run.steps) == 400


def test_refusals(path: Path) -> None:
    with pytest.raises(RunFileError, match="no such run file"):
        open_run(path)
    path.write_text("not SQLite, but long enough to be taken for it " * 40)
    with pytest.raises(RunFileError, match="cannot be read"):
        open_run(path)
    path.unlink()
    with RunWriter(path, INFO) as writer:
        writer.append(sample(0))
    run = open_run(path)
    with pytest.raises(InputError, match="has: loss, norm, theta"):
        run.series("los")
    with pytest.raises(InputError, match="no site 'c'"):
        run.series("norm", "c")
    with pytest.raises(InputError, match="no site 'c'"):
        run.summary("norm", "c")


def test_a_run_without_readings(path: Path) -> None:
    RunWriter(path, INFO).close()
    run = open_run(path)
    assert not len(run.steps) and not run.quantities and not run.findings
    assert run.since(0)[1] == 0
    with pytest.raises(InputError, match="none yet"):
        run.series("loss")
    assert repr(run).startswith("Run('made', ") and repr(str(path)) in repr(run)
