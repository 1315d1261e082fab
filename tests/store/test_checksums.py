"""A damaged row is reported and skipped, never shown; what is lost is missed."""

import shutil
import sqlite3
import struct
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.mutated_runs import campaign
from equipoise.errors import RunFileError
from equipoise.records import Finding, Reading
from equipoise.store import RunWriter, open_run, schema
from tests.report.runs import healthy
from tests.store.example_runs import INFO, assert_summaries_agree, sample

BEFORE_CHECKSUMS = Path(__file__).parent / "data" / "version2.eqp"
"""Forty steps of ``sample``, written by the last version without checksums."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.eqp"
    finding = Finding(step=3, severity="warn", code="r", message="m")
    with RunWriter(path, INFO) as writer:
        for step in range(40):
            writer.append(sample(step), findings=[finding] if step == 3 else [])
    return path


def change(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) >= 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))


def edit(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path)
    for name in ("reading_stays", "reading_remains"):
        db.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


def test_a_sound_file_has_no_damage(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert caplog.get_records("setup") == []
    run = open_run(path)
    assert_summaries_agree(run)
    run.since(0), run.ends("loss"), run.steps
    assert len(run.findings) == 1 and run.damage == []


def test_a_damaged_run_is_not_called_healthy(tmp_path: Path) -> None:
    path = tmp_path / "pre.eqp"
    run = healthy(path, steps=100)
    assert run.verdict.state == "healthy"
    loss = float(run.series("loss")[""][1][40])
    change(path, struct.pack("<d", loss), struct.pack("<d", loss + 0.25))
    verdict = open_run(path).verdict
    assert verdict.state == "not judged" and "damaged" in verdict.sentence


def test_a_flipped_loss_is_skipped_and_reported(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(path, struct.pack("<d", 1 / 10), struct.pack("<d", 1.75))
    run = open_run(path)
    steps, values = run.series("loss")[""]
    assert steps.tolist() == [s for s in range(40) if s != 7]
    assert 1.75 not in values
    assert run.damage == ["readings of loss: 1 damaged or lost"]
    run.series("loss")
    assert run.damage == ["readings of loss: 1 damaged or lost"]
    assert "readings of loss are damaged" in caplog.text
    (last,) = [f for f in run.findings if f.code == "store.damaged"]
    assert last.severity == "error" and "readings of loss" in str(last.params["error"])
    assert len(open_run(path).since(0)[0].readings) == 3 * 40 - 1


@pytest.mark.parametrize(
    ("statement", "ask", "what"),
    [
        ("DELETE FROM reading WHERE id = 32", "series", "readings of loss"),
        ("DELETE FROM reading WHERE id > 110", "series", "readings of loss"),
        ("DELETE FROM reading WHERE id > 110", "ends", "readings of loss"),
        ("UPDATE reading SET step = 99 WHERE id = 1", "ends", "readings of loss"),
        ("DELETE FROM reading WHERE id = 32", "since", "readings"),
        ("DELETE FROM step WHERE step = 9", "steps", "steps"),
        ("UPDATE step SET step = 900 WHERE step = 9", "steps", "steps"),
        ("DELETE FROM series WHERE quantity = 'norm'", "quantities", "series"),
        ("DELETE FROM event", "findings", "findings and remedies"),
        ("DELETE FROM summary WHERE level = 1", "summary", "summaries of loss"),
        (
            "UPDATE summary SET first = 900 WHERE level = 1 AND first = 16",
            "window",
            "summaries of loss",
        ),
        ("DELETE FROM totals", "steps", "counts"),
        ("DELETE FROM series_end", "series", "counts"),
    ],
)
def test_what_is_lost_is_missed(
    path: Path, statement: str, ask: str, what: str
) -> None:
    edit(path, statement)
    run = open_run(path)
    questions = {
        "series": lambda: run.series("loss"),
        "ends": lambda: run.ends("loss"),
        "since": lambda: run.since(0),
        "steps": lambda: run.steps,
        "quantities": lambda: run.quantities,
        "findings": lambda: run.findings,
        "summary": lambda: run.summary("loss", level=1),
        "window": lambda: run.summary("loss", between=(0, 17), points=4),
    }
    questions[ask]()
    assert any(sentence.startswith(what) for sentence in run.damage), run.damage


def test_the_last_of_what_was_written_before_a_run_was_continued_is_missed(
    path: Path,
) -> None:
    with RunWriter.resume(path) as writer:
        for step in range(40, 60):
            writer.append(sample(step))
    series = "(SELECT id FROM series WHERE quantity = 'loss')"
    lost = "reading WHERE step = 39", "summary WHERE level = 1 AND first = 16"
    edit(path, *(f"DELETE FROM {last} AND series = {series}" for last in lost))
    run = open_run(path)
    assert run.series("loss")[""][0].tolist() == [*range(39), *range(40, 60)]
    assert run.damage == ["readings of loss: 1 damaged or lost"]
    run.summary("loss", level=1)
    assert run.damage[1] == "summaries of loss: 1 damaged or lost"


def test_the_ends_are_those_of_what_is_left(path: Path) -> None:
    edit(path, "UPDATE reading SET step = 77 WHERE id IN (SELECT max(id) FROM reading)")
    first, last = open_run(path).ends("theta")
    assert (first.step, last.step) == (0, 38)


def test_a_file_with_a_damaged_description_is_refused(path: Path) -> None:
    edit(path, "UPDATE meta SET value = replace(value, 'made', 'maid')")
    for attempt in (open_run, RunWriter):
        with pytest.raises(RunFileError, match="damaged: it does not say what it is"):
            attempt(path)


def test_a_wrong_version_number_is_refused(path: Path) -> None:
    edit(path, "PRAGMA user_version = 2")
    with pytest.raises(RunFileError, match="tables are not of version 2"):
        open_run(path)


def test_a_damaged_file_can_be_continued(path: Path) -> None:
    edit(path, "DELETE FROM summary WHERE level = 1 AND last_id > 60")
    with RunWriter.resume(path) as writer:
        for step in range(40, 60):
            writer.append(sample(step))
    run = open_run(path)
    assert run.steps.tolist() == list(range(60))
    assert run.summary("loss", level=1)[""].rows.sum() == 60


def test_a_failed_append_leaves_no_gap(path: Path) -> None:
    too_late = Finding(step=2**70, severity="info", code="r", message="m")
    with RunWriter.resume(path) as writer:
        with pytest.raises(OverflowError):
            writer.append(sample(40), findings=[too_late])
        writer.append(sample(41))
    run = open_run(path)
    assert run.steps.tolist() == [*range(40), 41]
    run.since(0), run.series("loss")
    assert run.damage == []


def test_files_without_checksums_are_read_and_gain_them(tmp_path: Path) -> None:
    path = Path(shutil.copy(BEFORE_CHECKSUMS, tmp_path))
    before = path.read_bytes()
    run = open_run(path)
    assert run.version == 2 and len(run.steps) == 40
    assert_summaries_agree(run)
    assert [end.step for end in run.ends("theta")] == [0, 39]
    assert len(run.since(0)[0].readings) == 120
    assert path.read_bytes() == before
    with RunWriter.resume(path) as writer:
        writer.append(sample(40))
    run = open_run(path)
    assert run.version == schema.VERSION and len(run.steps) == 41
    assert_summaries_agree(run)
    run.since(0), run.findings
    assert run.damage == []
    change(path, struct.pack("<d", 1 / 10), struct.pack("<d", 1.75))
    run = open_run(path)
    assert 1.75 not in run.series("loss")[""][1] and run.damage


def test_gaps_that_an_older_version_left_are_no_damage(tmp_path: Path) -> None:
    """It counted appends that failed."""
    path = Path(shutil.copy(BEFORE_CHECKSUMS, tmp_path))
    with closing(sqlite3.connect(path)) as db, db:
        finding = Finding(step=39, severity="info", code="r", message="m")
        row = 130, "finding", finding.step, finding.to_json()
        db.execute("INSERT INTO event VALUES (?, ?, ?, ?)", row)
    with RunWriter.resume(path) as writer:
        writer.append(sample(40))
    run = open_run(path)
    news, _ = run.since(0)
    assert len(news.readings) == 123 and news.findings == [finding]
    assert run.damage == []
    edit(path, "DELETE FROM reading WHERE id = 132")
    run.since(0)
    assert run.damage == ["readings: 1 damaged or lost"]


def test_an_old_damaged_file_raises_only_our_errors(tmp_path: Path) -> None:
    path = Path(shutil.copy(BEFORE_CHECKSUMS, tmp_path))
    edit(path, "UPDATE reading SET data = 'text' WHERE id = 4")
    with pytest.raises(RunFileError, match="cannot be read"):
        open_run(path).series("loss")
    edit_meta = "UPDATE meta SET value = '[1]'"
    db = sqlite3.connect(path)
    db.execute(edit_meta)
    db.commit()
    db.close()
    with pytest.raises(RunFileError, match="cannot be read"):
        open_run(path)


def test_every_mutation_is_reported(tmp_path: Path) -> None:
    """A sample; ``python -m benchmarks.mutated_runs`` makes 2,000."""
    found = sum(campaign(tmp_path, 60, seed=11).values(), Counter())
    assert set(found) <= {"refused", "unchanged", "reported"}, found
    assert found["reported"] > 5 and found["refused"] > 5


def test_a_scalar_is_a_row_too(path: Path) -> None:
    assert open_run(path).ends("loss")[0] == Reading.scalar(0, "loss", 1 / 3)
