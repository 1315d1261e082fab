"""A report says what the runs hold: no more, no less, and absent is not zero."""

import math
from pathlib import Path

import pytest

from equipoise.records import Finding, Reading, RunInfo
from equipoise.report.report_model import (
    ABSENT,
    SHOWN,
    block_sites,
    first_to_last,
    labelled,
    short,
    view,
    worst,
)
from equipoise.store import Run, RunWriter, open_run
from tests.report.runs import pre_and_post

INFO = RunInfo(name="made", created="now", version="0")


def written(path: Path, *readings: Reading, findings=(), info: RunInfo = INFO) -> Run:
    with RunWriter(path, info) as writer:
        writer.append(readings, findings=findings)
    return open_run(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.eqp"


def test_every_run_has_its_verdict(tmp_path: Path) -> None:
    report = view(pre_and_post(tmp_path))
    states = {label: verdict.state for label, verdict in report.verdicts.items()}
    assert states["post-LN"] in {"at risk", "failing"}
    assert report.state == worst(report.verdicts.values()) and not report.given
    assert report.verdict.splitlines()[1].startswith(f"post-LN: {states['post-LN']}")


def test_absent_quantities_are_named_and_never_zero(path: Path) -> None:
    report = view({"r": written(path, Reading.scalar(0, "learning_rate", 0.1))})
    cells = dict(report.table)
    assert cells["loss, first → last"] == cells["largest S over layers"] == [ABSENT]
    assert cells["gradient, first layer ÷ last"] == [ABSENT]


def test_broken_values_are_named(path: Path) -> None:
    losses = [2.0, math.nan, 1.5, math.inf]
    run = written(path, *(Reading.scalar(i, "loss", x) for i, x in enumerate(losses)))
    assert dict(view({"r": run}).table)["loss, first → last"] == ["2 → Inf"]


def test_layers_are_found_without_being_declared(path: Path) -> None:
    sites = ("head", "h.10", "h.9", "h.2", "embed")
    rows = tuple((v,) for v in (9.0, 4.0, 3.0, 2.0, 8.0))
    run = written(
        path, Reading(step=0, quantity="gradient.norm", sites=sites, values=rows)
    )
    assert block_sites(run, run.ends("gradient.norm")[1]) == ["h.2", "h.9", "h.10"]
    assert first_to_last(run) == 0.5


@pytest.mark.parametrize("last", [0.0, None])
def test_no_ratio_without_two_layers_or_over_zero(
    path: Path, last: float | None
) -> None:
    sites = ("h.0", "h.1") if last is not None else ("h.0",)
    rows = ((1.0,), (last,)) if last is not None else ((1.0,),)
    run = written(
        path, Reading(step=0, quantity="gradient.norm", sites=sites, values=rows)
    )
    assert first_to_last(run) is None


def test_gravest_findings_come_first_and_a_page_stays_readable(path: Path) -> None:
    many = [
        Finding(step=s, severity="warn", code="r", message="m")
        for s in range(SHOWN + 9)
    ]
    late = Finding(step=999, severity="error", code="r", message="It broke.")
    run = written(path, Reading.scalar(0, "loss", 1.0), findings=[*many, late])
    report = view({"r": run})
    assert report.findings[0].finding == late and report.unlisted == 10
    assert dict(report.table)["findings"] == [f"1 error, {SHOWN + 9} warn"]


def test_the_largest_sensitivity_is_broken_if_any_is(path: Path) -> None:
    S = Reading(
        step=0,
        quantity="sensitivity.S",
        sites=("a", "b"),
        values=((3.0,), (math.nan,)),
    )
    assert dict(view({"r": written(path, S)}).table)["largest S over layers"] == ["NaN"]


def test_runs_of_one_name_are_called_by_what_differs(tmp_path: Path) -> None:
    runs = [written(tmp_path / f"lr{i}.eqp") for i in range(3)]
    assert list(labelled(runs)) == ["lr0", "lr1", "lr2"]
    assert dict(view(labelled(runs)).table)["steps"] == ["none yet"] * 3
    assert list(labelled(runs[:1])) == ["made"]
    names = [f"TransformerEncoder-20261118T04010{i}Z-428b.eqp" for i in range(2)]
    long = [written(tmp_path / name) for name in names]
    assert list(labelled(long)) == ["made", "made (2)"]
    assert list(labelled([runs[0], runs[0]])) == ["made", "made (2)"]


def test_a_given_verdict_is_not_called_fine(path: Path) -> None:
    runs = {"r": written(path, Reading.scalar(0, "loss", 1.0))}
    assert view(runs, verdict="It cannot learn.").state == "not judged"


def test_numbers_for_people() -> None:
    assert [short(x) for x in (1.0, 1234.5, 1e-5, 2e7, -math.inf, 0.0)] == [
        "1",
        "1234",
        "1.000e-05",
        "2.000e+07",
        "−Inf",
        "0",
    ]
