"""The page is one file that needs nothing, and holds what the view holds."""

import json
import re
from pathlib import Path

from equipoise.records import Finding, Reading, RunInfo
from equipoise.report.html import brief, drawn, embedded, picks, write_report
from equipoise.report.views import view
from equipoise.store import RunWriter, open_run
from tests.report.runs import pre_and_post


def test_the_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    path = write_report(pre_and_post(tmp_path), tmp_path / "deep" / "report.html")
    page = path.read_text(encoding="utf-8")
    ours = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", ours)
    assert "url(" not in ours and "@import" not in ours
    assert "default-src 'none'" in ours


def test_data_is_what_the_view_says(tmp_path: Path) -> None:
    report = view(pre_and_post(tmp_path))
    found = json.loads(embedded(report.panels))
    assert [panel["key"] for panel in found] == [p.key for p in report.panels]
    assert found[0]["curves"][0]["y"] == report.panels[0].curves[0].y


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b>"
    info = RunInfo(name=evil, created="now", version="0", details={evil: evil})
    finding = Finding(
        step=0,
        severity="warn",
        rule=evil,
        message=evil,
        site=evil,
        evidence={evil: evil},
    )
    with RunWriter(tmp_path / "run.eqp", info) as writer:
        writer.append([Reading.scalar(0, "loss", 1.0)], findings=[finding])
    runs = {evil: open_run(tmp_path / "run.eqp")}
    page = write_report(runs, tmp_path / "r.html").read_text(encoding="utf-8")
    assert "alert(1)</script>" not in page and "<b>" not in page.replace("<b>&lt;", "")


def test_title_and_verdict_may_be_given(tmp_path: Path) -> None:
    runs = pre_and_post(tmp_path)
    path = write_report(runs, tmp_path / "r.html", title="Tøday", verdict="Use pre-LN.")
    page = path.read_text(encoding="utf-8")
    assert "<h1>Tøday</h1>" in page and "<p>Use pre-LN.</p>" in page


def test_details_in_one_line() -> None:
    assert brief(1234567) == "1,234,567" and brief(["a", "b"]) == "a, b"
    assert brief("x") == "x" and drawn(None) == "not finite" and drawn(0.5) == "0.5"
    assert picks(list(range(1000)))[0] == 0 and picks(list(range(1000)))[-1] == 999
