"""``equipoise lab`` as it is typed."""

from pathlib import Path

import pytest

from equipoise import cli
from equipoise_lab.running.execution import execute
from equipoise_lab.studies.catalogue import RECIPES, recipe


def typed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(list(words))
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def test_list_and_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = typed(capsys, "lab", "list")
    assert code == 0 and all(name in out for name in RECIPES)
    code, out, _ = typed(capsys, "lab", "status", "prepost", "--out", str(tmp_path))
    assert code == 0 and "prepost-quick: 0 of 9 runs done" in out


def test_theorem(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = typed(capsys, "lab", "theorem")
    assert code == 0 and "12 keys" in out and "theorem holds" in out


def test_run_then_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = ("--quick", "--out", str(tmp_path))
    experiment = recipe("smoke", quick=True)
    for task in experiment.tasks:  # here, to spare the suite four processes
        execute(task, tmp_path / experiment.name)
    code, said, _ = typed(capsys, "lab", "run", "smoke", *out)
    assert code == 0 and "minus pre" in said
    pages = list(tmp_path.rglob("report.html"))
    assert len(pages) == 1 and "Does the sweep itself work?" in pages[0].read_text()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("result.json")}
    kept = tmp_path / "kept"
    code, again, _ = typed(
        capsys, "lab", "report", "smoke", *out, "--publish", str(kept)
    )
    assert code == 0 and "minus pre" in again and "published: " in again
    page = (kept / "smoke-quick" / "README.md").read_text()
    assert "`equipoise lab run smoke --quick`" in page
    assert "smoke-quick/README.md" in (kept / "README.md").read_text()
    code, status, _ = typed(capsys, "lab", "status", "smoke", "--out", str(tmp_path))
    assert "smoke-quick: 4 of 4 runs done" in status
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("result.json")}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("lab", "run", "zzz"), "no experiment 'zzz'; there are prepost"),
        (("lab", "run", "smoke", "--on", "moon"), "must be one of local, ray"),
        (("lab", "report", "smoke"), "no finished run"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EQUIPOISE_LAB", str(tmp_path))
    code, _, error = typed(capsys, *words)
    assert code == 2 and says in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
