"""Older files are read and continued, newer ones refused, others recognised."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from equipoise.errors import RunFileError
from equipoise.records import Reading
from equipoise.store import RunWriter, open_run, schema
from tests.store.example_runs import INFO, assert_summaries_agree, files

OLD = Path(__file__).parent / "data" / "version1.eqp"
"""Written by the first version of the store, before it had summaries."""


def test_an_older_file_is_read(tmp_path: Path) -> None:
    path = Path(shutil.copy(OLD, tmp_path))
    before = path.read_bytes()
    run = open_run(path)
    assert run.version == 1 and run.info.name == "old" and len(run.findings) == 2
    assert_summaries_agree(run)
    assert path.read_bytes() == before and files(tmp_path) == [OLD.name]


def test_an_older_file_is_continued(tmp_path: Path) -> None:
    path = Path(shutil.copy(OLD, tmp_path))
    with RunWriter.resume(path) as writer:
        writer.append([Reading.scalar(40, "loss", 0.5)])
    run = open_run(path)
    assert run.version == schema.VERSION and len(run.steps) == 41
    assert_summaries_agree(run)


def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.eqp"
    RunWriter(path, INFO).close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    db.close()
    for attempt in (open_run, RunWriter):
        with pytest.raises(RunFileError, match="newer Equipoise .* pip install -U"):
            attempt(path)
    assert files(tmp_path) == ["run.eqp"]


def test_another_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.eqp"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE mine (x)")
    db.close()
    for attempt in (open_run, lambda path: RunWriter(path, INFO)):
        with pytest.raises(RunFileError, match="not a run of Equipoise"):
            attempt(path)


def test_an_empty_file_is_not_a_run_yet(tmp_path: Path) -> None:
    path = tmp_path / "run.eqp"
    path.touch()
    with pytest.raises(RunFileError, match="nothing has been written here yet"):
        open_run(path)
    RunWriter(path, INFO).close()
    assert open_run(path).info == INFO


@pytest.mark.parametrize("file", ["version1.eqp", "version2.eqp"])
def test_a_file_without_a_card_opens_and_says_so(file: str) -> None:
    run = open_run(OLD.with_name(file))
    assert not run.card and str(run.card) == "" and run.damage == []
