"""A full disk, a deleted file, a deleted directory: kept, tried again, and said."""

import shutil
from pathlib import Path

import pytest

from equipoise.errors import RunFileError
from equipoise.store import RetryingWriter, RunWriter, open_run
from tests.store.example_runs import INFO, assert_summaries_agree, files, sample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "run.eqp"


def fill_disk(writer: RunWriter) -> None:
    db = writer._file.db
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")


def make_room(writer: RunWriter) -> None:
    writer._file.db.execute("PRAGMA max_page_count = 1000000")


def test_a_full_disk_is_our_error_and_changes_nothing(path: Path) -> None:
    with RunWriter(path, INFO) as writer:
        writer.append(sample(0))
        fill_disk(writer)
        with pytest.raises(RunFileError, match="cannot be written .*full"):
            for step in range(1, 1000):
                writer.append(sample(step))
        make_room(writer)
        writer.append(sample(step))
    run = open_run(path)
    assert run.steps.tolist() == list(range(step + 1))
    assert_summaries_agree(run)


def test_a_full_disk_once_loses_nothing(path: Path) -> None:
    writer = RunWriter(path, INFO)
    retrying = RetryingWriter(writer)
    fill_disk(writer)
    found = [f for step in range(400) for f in retrying.append(sample(step))]
    assert [f.code for f in found] == ["store.not_written"]
    assert "full" in str(found[0].params["error"]) and found[0].severity == "warn"
    make_room(writer)
    (again,) = retrying.append(sample(400))
    assert again.code == "store.written_again" and again.severity == "info"
    assert retrying.append(sample(401)) == [] and retrying.close() == []
    run = open_run(path)
    assert run.steps.tolist() == list(range(402))
    rules = [f.code for f in run.findings]
    assert rules == ["store.not_written", "store.written_again"]
    assert_summaries_agree(run)


def test_what_is_kept_is_bounded_and_what_is_dropped_is_counted(path: Path) -> None:
    writer = RunWriter(path, INFO)
    retrying = RetryingWriter(writer, most_values=800)  # a hundred steps of 8 values
    fill_disk(writer)
    for step in range(400):
        retrying.append(sample(step))
    make_room(writer)
    (again,) = retrying.append(sample(400))
    assert again.severity == "error" and again.params["dropped"] > 500
    steps = open_run(path).steps.tolist()
    assert steps[-100:] == list(range(301, 401)) and len(steps) < 300
    fill_disk(writer)
    assert any(retrying.append(sample(step)) for step in range(401, 480))
    make_room(writer)
    (again,) = retrying.append(sample(480))
    assert again.severity == "info" and again.params["dropped"] == 0
    assert retrying.close() == []


@pytest.mark.parametrize("most_values", [2_000_000, 80])
def test_readings_never_written_are_reported_at_the_end(
    path: Path, most_values: int
) -> None:
    writer = RunWriter(path, INFO)
    retrying = RetryingWriter(writer, most_values=most_values)
    fill_disk(writer)
    for step in range(300):
        retrying.append(sample(step))
    (unsaved,) = retrying.close()
    assert unsaved.code == "store.not_saved" and unsaved.severity == "error"
    recorded = open_run(path).steps.tolist()
    assert recorded == list(range(len(recorded))) and len(recorded) < 200
    left = len(sample(0)) * (300 - len(recorded))
    assert unsaved.step == 299 and unsaved.params["readings"] == left


@pytest.mark.parametrize("gone", ["file", "directory", "moved", "wal"])
def test_a_lost_file_is_made_anew_with_all_that_was_in_it(
    path: Path, gone: str
) -> None:
    retrying = RetryingWriter(RunWriter(path, INFO))
    for step in range(20):
        assert retrying.append(sample(step)) == []
    if gone == "file":
        path.unlink()
    elif gone == "wal":
        path.with_name("run.eqp-wal").unlink()
    elif gone == "moved":
        path.rename(path.with_name("elsewhere.eqp"))
    else:
        shutil.rmtree(path.parent)
    (lost,) = retrying.append(sample(20))
    assert lost.code == "store.file_lost" and lost.severity == "error"
    assert open_run(path).steps.tolist() == list(range(21))
    with pytest.raises(RunFileError, match="already being written by this process"):
        RunWriter(path, INFO)
    assert retrying.append(sample(21)) == [] and retrying.close() == []
    run = open_run(path)
    assert run.steps.tolist() == list(range(22)) and len(run.findings) == 1
    assert_summaries_agree(run)
    assert set(files(path.parent)) <= {"run.eqp", "elsewhere.eqp"}


def test_a_file_lost_after_the_last_append_is_reported(path: Path) -> None:
    retrying = RetryingWriter(RunWriter(path, INFO))
    retrying.append(sample(0))
    path.unlink()
    assert [f.code for f in retrying.close()] == ["store.file_lost"]
    assert open_run(path).steps.tolist() == [0]


def test_another_file_in_its_place_is_left_alone(path: Path) -> None:
    retrying = RetryingWriter(RunWriter(path, INFO))
    retrying.append(sample(0))
    path.unlink()
    path.write_text("precious")
    (refused,) = retrying.append(sample(1))
    assert refused.code == "store.not_written"
    assert "replaced" in str(refused.params["error"])
    assert [f.code for f in retrying.close()] == ["store.not_saved"]
    assert path.read_text() == "precious"


def test_a_second_writer_through_a_symlink_is_refused(path: Path) -> None:
    with RunWriter(path, INFO) as writer:
        link = path.with_name("link.eqp")
        link.symlink_to(path)
        with pytest.raises(RunFileError, match="already being written"):
            RunWriter(link, INFO)
        writer.append(sample(0))
    with RunWriter(link, INFO) as writer:
        writer.append(sample(1))
    assert link.is_symlink() and files(path.parent) == ["link.eqp", "run.eqp"]
    assert open_run(path).steps.tolist() == [0, 1]


def test_a_place_that_cannot_be_written_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFileError, match="cannot be written"):
        RunWriter(tmp_path / "file" / "run.eqp", INFO)
