"""The page is one file that needs nothing, and holds what the run files hold."""

import base64
import json
import math
import re
from pathlib import Path

import numpy as np

from equipoise.records import Finding, Reading, RunInfo
from equipoise.report.html import embedded, report_json, write_report
from equipoise.report.page_model import brief
from equipoise.report.report_model import view
from equipoise.store import RunWriter, open_run
from tests.report.runs import BLOCKS, pre_and_post


def unpacked(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


def test_the_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    path = write_report(pre_and_post(tmp_path), tmp_path / "deep" / "report.html")
    page = path.read_text(encoding="utf-8")
    ours = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", ours)
    assert "url(" not in ours and "@import" not in ours
    assert "default-src 'none'" in ours
    assert len(page) < 1_000_000


def test_data_are_the_recorded_values(tmp_path: Path) -> None:
    runs = pre_and_post(tmp_path)
    data = json.loads(embedded(report_json(view(runs), runs)))
    grid = data["grids"]["post-LN"]["gradient.norm"]
    steps, first = runs["post-LN"].series("gradient.norm")[BLOCKS[0]]
    assert data["columns"][grid["columns"]]["last"] == steps.tolist()
    values = unpacked(grid["mean"]).reshape(len(grid["sites"]), -1)
    np.testing.assert_allclose(values[0], first, rtol=1e-6)
    # The layers from the first to the last; what is outside of them comes last.
    assert grid["sites"] == [*BLOCKS, "embed"] and grid["layers"][-1] is None


def test_every_quantity_and_single_heads_are_on_the_page(tmp_path: Path) -> None:
    runs = pre_and_post(tmp_path, steps=40)
    data = report_json(view(runs), runs)
    assert set(data["grids"]["pre-LN"]) == set(runs["pre-LN"].quantities)
    heads = data["heads"]["pre-LN"]["attention.theta.p5"]
    truth = runs["pre-LN"].series("attention.theta.p5")
    shape = (len(heads["steps"]), len(heads["sites"]), heads["width"])
    values = unpacked(heads["values"]).reshape(shape)
    for s, site in enumerate(heads["sites"]):
        np.testing.assert_allclose(values[:, s], truth[site][1], rtol=1e-6)
    assert data["note"] == ""


def test_the_decisive_chart_is_the_gradient_over_depth(tmp_path: Path) -> None:
    runs = pre_and_post(tmp_path)
    data = report_json(view(runs), runs)
    healthy, failing_run = (run["verdict"] for run in data["runs"])
    assert failing_run["chart"]["quantity"] == "gradient.norm"
    assert (
        failing_run["chart"]["view"] == "depth" and failing_run["chart"]["layer"] == 0
    )
    assert healthy["chart"]["quantity"] == "loss"


def test_a_long_run_is_merged_and_the_page_says_so(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a.eqp", INFO) as writer:
        losses = (5.0 if s == 1777 else 1.0 for s in range(3000))
        writer.append([Reading.scalar(s, "loss", x) for s, x in enumerate(losses)])
    runs = {"a": open_run(tmp_path / "a.eqp")}
    data = report_json(view(runs), runs)
    grid = data["grids"]["a"]["loss"]
    assert unpacked(grid["high"]).max() == 5.0  # the spike is there
    assert len(unpacked(grid["mean"])) <= 600 and "merged" in data["note"]


INFO = RunInfo(name="made", created="now", version="0")


def test_nan_and_inf_are_marks_and_never_zero(tmp_path: Path) -> None:
    losses = [2.0, math.nan, 1.5, math.inf]
    with RunWriter(tmp_path / "a.eqp", INFO) as writer:
        writer.append([Reading.scalar(i, "loss", x) for i, x in enumerate(losses)])
    runs = {"a": open_run(tmp_path / "a.eqp")}
    data = json.loads(embedded(report_json(view(runs), runs)))
    grid = data["grids"]["a"]["loss"]
    assert grid["broken"] == [[0, 0], [1, 3]]
    assert np.isnan(unpacked(grid["mean"])).tolist() == [False, True, False, True]
    assert data["runs"][0]["changes"][0]["step"] == 1
    assert data["runs"][0]["changes"][0]["broken"]


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b>\u2028"
    info = RunInfo(name=evil, created=evil, version=evil, details={evil: evil})
    finding = Finding(
        step=0, severity="warn", code=evil, message=evil, site=evil, params={evil: 1}
    )
    sites = Reading(step=0, quantity=evil, sites=(evil,), values=((1.0,),))
    with RunWriter(tmp_path / "run.eqp", info) as writer:
        writer.append([sites], findings=[finding])
    runs = {evil: open_run(tmp_path / "run.eqp")}
    page = write_report(runs, tmp_path / "r.html").read_text(encoding="utf-8")
    assert "alert(1)</script>" not in page and "<b>\u2028" not in page
    assert page.count("<script") == 2 and page.count("</script>") == 2


def test_title_and_verdict_may_be_given(tmp_path: Path) -> None:
    runs = pre_and_post(tmp_path, steps=20)
    path = write_report(runs, tmp_path / "r.html", title="Tøday", verdict="Use pre-LN.")
    page = path.read_text(encoding="utf-8")
    assert "<h1>Tøday</h1>" in page and '"verdict":"Use pre-LN."' in page


def test_details_in_one_line() -> None:
    assert brief(1234567) == "1,234,567" and brief(["a", "b"]) == "a, b"
    assert brief("x") == "x" and len(brief("x" * 9999)) < 2100
