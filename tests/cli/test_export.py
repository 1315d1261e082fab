"""``equipoise export``: other programs read back what a run holds."""

import json
import math
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from equipoise import cli
from equipoise.errors import InputError, MissingExtraError, RunFileError
from equipoise.store import Run
from tests.report.runs import healthy

KEYS = ["step", "quantity", "site", "head"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return healthy(tmp_path / "runs" / "pre.eqp", steps=11)


def export(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["export", *map(str, words)])
    printed = capsys.readouterr()
    return int(left.value.code or 0), printed.out, printed.err


def test_csv_parquet_and_json_lines_hold_the_long_table(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {kind: tmp_path / "out" / f"x.{kind}" for kind in ("csv", "jsonl")}
    parquet = tmp_path / "x.parquet"
    options = [word for kind, path in files.items() for word in (f"--{kind}", path)]
    code, out, _ = export(capsys, run.path, *options, "--parquet", parquet)
    assert code == 0 and out.count("wrote") == 3
    expected = run.to_pandas().astype({"quantity": str, "site": str})
    lines = [json.loads(line) for line in files["jsonl"].read_text().splitlines()]
    for found in (
        pd.read_csv(files["csv"], keep_default_na=False),
        pd.DataFrame(lines),
        pq.read_table(parquet).to_pandas().astype({"quantity": str, "site": str}),
    ):
        pd.testing.assert_frame_equal(found, expected, check_dtype=False)


def test_the_wide_form_and_a_choice_of_quantities(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--wide", "--quantities", "loss,gradient.norm.*", "--csv", "-"]
    code, out, _ = export(capsys, run.path, *words)
    header, *rows = [line.split(",") for line in out.splitlines()]
    assert code == 0 and header == ["step", "loss", "gradient.norm.total"]
    assert len(rows) == 11
    assert rows[5][2] and not rows[6][2]  # read every fifth step, empty between
    code, out, _ = export(capsys, run.path, *words[:3], "--jsonl", "-")
    assert len(json.loads(out.splitlines()[6])) == 2 and code == 0


def test_tensorboard_shows_the_mean_over_heads(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "loss,attention.theta.p5"
    code, *_ = export(
        capsys, run.path, "--tensorboard", tmp_path / "tb", "--quantities", names
    )
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    steps, losses = run.series("loss")[""]
    shown = [(e.step, e.value) for e in events.Scalars("loss")]
    assert code == 0 and [step for step, _ in shown] == steps.tolist()
    # Event files hold fp32.
    assert [v for _, v in shown] == pytest.approx(losses.tolist(), rel=1e-6)
    _, theta = run.series("attention.theta.p5")["blocks.3.attention"]
    found = events.Scalars("attention.theta.p5/blocks.3.attention")
    assert found[0].value == pytest.approx(theta[0].mean(), rel=1e-6)


def test_json_lines_write_nan_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from equipoise.records import Reading, RunInfo
    from equipoise.store import RunWriter

    info = RunInfo(name="x", created="2026-11-17T20:00:00+00:00", version="0.1.0")
    with RunWriter(tmp_path / "x.eqp", info) as writer:
        writer.append([Reading.scalar(0, "loss", math.inf)])
    out = export(capsys, tmp_path / "x.eqp", "--jsonl", "-")[1]
    assert json.loads(out)["value"] == "inf"


def test_the_newest_run_of_a_folder_is_taken(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUIPOISE_RUNS", str(run.path.parent))
    assert export(capsys, "--csv", "-", "--quantities", "loss")[0] == 0
    above = run.path.parent.parent
    assert export(capsys, above, "--csv", "-", "--quantities", "loss")[0] == 0
    assert export(capsys, above / "absent.eqp", "--csv", "-")[0] == (
        RunFileError.exit_code
    )


def test_bad_requests_are_one_line_and_leave_no_file(
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = tmp_path / "x.csv"
    page.write_text("mine")
    for words, line in (
        ([], "say where to"),
        (["--csv", page], "--force replaces it"),
        (["--csv", "-", "--quantities", "nope"], "no quantity matches 'nope'"),
        (["--wide", "--tensorboard", tmp_path / "tb"], "--wide has no meaning"),
    ):
        code, out, err = export(capsys, run.path, *words)
        assert code == InputError.exit_code and line in err and err.count("\n") == 1
    assert page.read_text() == "mine"
    assert export(capsys, run.path, "--csv", page, "--force")[0] == 0
    assert page.read_text().startswith("step,")
    long = (
        tmp_path / f"{'x' * 245}.csv"
    )  # its draft's name is longer than a name may be
    code, _, err = export(capsys, run.path, "--csv", long)
    assert code == InputError.exit_code and f"{long}:" in err.replace("\n", "")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    code, _, err = export(capsys, run.path, "--parquet", tmp_path / "x.parquet")
    assert code == MissingExtraError.exit_code and "equipoise[export]" in err
    assert not list(tmp_path.glob("*.parquet")) and not list(tmp_path.glob(".*"))
