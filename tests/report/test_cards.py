"""The card is on every surface, and runs are compared by it."""

import json
from pathlib import Path

import pytest

from equipoise.cli import main
from equipoise.judging.card import Card
from equipoise.records import Reading, RunInfo
from equipoise.report.comparison import compared
from equipoise.report.html import write_report
from equipoise.report.live import Follower
from equipoise.report.notebook import block
from equipoise.store import Run, RunWriter, open_run

SETUP = {
    "host": "machine<1>",
    "system": "Linux",
    "seed": 3,
    "optimizers": [{"class": "AdamW", "groups": 1, "options": {"lr": 0.001}}],
}


def written(path: Path, **setup: object) -> Run:
    info = RunInfo(name=path.stem, created="now", version="0")
    card = Card(step=1, samples=2, sections={"setup": {**SETUP, **setup}})
    with RunWriter(path, info) as writer:
        losses = [Reading.scalar(step, "loss", 3.0) for step in range(3)]
        writer.append(losses, card=card if setup != {"host": None} else None)
    return open_run(path)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["report", *words])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_terminal_shows_the_card_before_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path / "a.eqp")
    lines = printed(capsys, str(run.path)).splitlines()
    assert lines[0].startswith("a: not judged") and lines[1] == "Set-up"
    at = [n for n, line in enumerate(lines) if "AdamW" in line or "steps" in line]
    assert "AdamW" in lines[at[-2]] and "steps" in lines[at[-1]]


def test_json_has_lines_and_facts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path / "a.eqp")
    (found,) = json.loads(printed(capsys, str(run.path), "--json"))["runs"]
    assert found["card"]["sections"]["setup"]["seed"] == 3
    assert found["card"]["opening"] == list(run.card.opening) != []
    assert dict(found["card"]["text"])["Set-up"] == list(run.card.text["Set-up"])


def test_options_of_the_set_up_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [{"class": "AdamW", "groups": 1, "options": {"lr": 0.1}}]
    runs = [
        written(tmp_path / "a.eqp"),
        written(tmp_path / "b.eqp", seed=4, optimizers=other),
    ]
    found = compared({"a": runs[0], "b": runs[1]})
    assert found["options"] == [
        ("seed", ["3", "4"]),
        ("optimizer.options.lr", ["0.001", "0.1"]),
    ]
    text = printed(capsys, *(str(run.path) for run in runs))
    assert "optimizer.options.lr" in text and "b, loop: AdamW at rate 0.1" in text


def test_a_run_without_a_card_is_reported_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path / "a.eqp", host=None)
    assert not run.card and "Set-up" not in printed(capsys, str(run.path))
    assert "<details>" not in block(Follower(run).look())


def test_page_and_notebook_hold_the_card_escaped(tmp_path: Path) -> None:
    run = written(tmp_path / "a.eqp")
    page = write_report({"a": run}, tmp_path / "a.html").read_text(encoding="utf-8")
    assert "machine\\u003c1>" in page and "machine<1>" not in page
    shown = block(Follower(run).look())
    assert "machine&lt;1&gt;" in shown and "loop: AdamW at rate 0.001" in shown
