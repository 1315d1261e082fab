"""Where runs live, and which is the newest."""

import os
import random
import re
from pathlib import Path

import pytest

from equipoise.errors import RunFileError
from equipoise.store import RunWriter, run_path, runs_directory
from equipoise.store.location import newest, run_files
from tests.store.example_runs import INFO


def test_an_explicit_path_is_used_as_given() -> None:
    assert run_path("here/mine.db", "gpt") == Path("here/mine.db")
    assert run_path(Path("/abs/x"), "gpt") == Path("/abs/x")
    assert run_path("~/x.eqp", "gpt") == Path.home() / "x.eqp"


def test_by_default_among_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EQUIPOISE_RUNS", raising=False)
    path = run_path(None, "my model/2!")
    assert path.parent == Path("runs") == runs_directory()
    assert re.fullmatch(r"my-model-2-\d{8}T\d{6}Z-[0-9a-f]{4}\.eqp", path.name)
    monkeypatch.setenv("EQUIPOISE_RUNS", "/data/runs")
    assert run_path(None, "../..").parent == Path("/data/runs")
    assert run_path(None, "../..").name.startswith("run-")


def test_the_users_random_numbers_do_not_move() -> None:
    random.seed(0)
    state = random.getstate()
    run_path(None, "gpt")
    assert random.getstate() == state


def test_the_newest(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="no .eqp file in .*EQUIPOISE_RUNS"):
        newest(tmp_path)
    for age, name in enumerate("abc"):
        path = tmp_path / f"{name}.eqp"
        RunWriter(path, INFO).close()
        os.utime(path, (1000 - age, 1000 - age))
    assert [p.stem for p in run_files(tmp_path)] == ["a", "b", "c"]
    assert newest(tmp_path).stem == "a"
