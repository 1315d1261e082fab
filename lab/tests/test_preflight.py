"""What would end every run is said once, before the first of them starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from equipoise.errors import InputError
from equipoise.watching.options import read_options
from equipoise_lab.data import DataOptions
from equipoise_lab.running.runner import preflight, run_experiment
from lab.tests.test_commands import typed
from lab.tests.test_runner import ARMS, SWEEP

WATCHED = replace(
    SWEEP, arms=tuple(replace(a, train=replace(a.train, watch=True)) for a in ARMS)
)


def test_a_slip_in_the_environment_stops_the_sweep_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUIPOISE_EVRY", "5")
    with pytest.raises(InputError, match="EQUIPOISE_EVRY: no such option"):
        run_experiment(WATCHED, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()
    preflight(SWEEP.tasks)  # unwatched runs do not read it
    preflight([])  # and where all is finished nobody asks


def test_settings_of_the_lab_are_no_settings_of_watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUIPOISE_LAB", str(tmp_path))
    assert read_options({"every": 3}).every == 3


def test_data_that_no_arm_can_open(tmp_path: Path) -> None:
    absent = DataOptions(source="text", path=str(tmp_path / "none.txt"))
    lost = tuple(replace(arm, data=absent) for arm in ARMS)
    with pytest.raises(InputError, match="no file"):
        preflight(replace(SWEEP, arms=lost).tasks)
    preflight(replace(SWEEP, arms=(ARMS[0], lost[1])).tasks)  # one arm may fail alone


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "smoke", "--publish", "file"), "is a file: a folder is wanted"),
        (("run", "smoke", "--publish", "file/deep"), "nothing can be written"),
        (("run", "smoke", "--out", "file"), "is a file: a folder is wanted"),
        (("run", "fragility", "--data", "absent"), "no file test_batch in absent"),
        (("report", "smoke", "--publish", "file"), "is a file: a folder is wanted"),
        (("run", "prepsot"), "no experiment 'prepsot'; did you mean 'prepost'?"),
        (("status", "fragilty"), "no experiment 'fragilty'; did you mean"),
    ],
)
def test_a_wrong_option_fails_before_any_work(
    words: tuple[str, ...],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUIPOISE_LAB", raising=False)
    (tmp_path / "file").write_text("mine")
    code, _, error = typed(capsys, "lab", *words)
    assert code == InputError.exit_code and says in error and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"
