"""What a user reads: pages, the two commands, and the records of a watched run."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch

import equipoise
from docs.remedies import HERE, pages, texts
from equipoise.cli import main
from equipoise.judging.remedy_catalogue import CATALOGUE
from equipoise.judging.remedy_choice import remedies_for
from equipoise.judging.verdict import Verdict
from equipoise.records import Finding
from equipoise.remedies.catalogue import REMEDIES, remedy
from equipoise.remedies.roll_back import snapshot
from tests.remedies.families import a_model, an_optimizer, train
from tests.report.runs import failing_run


def test_pages_are_what_the_catalogue_says() -> None:
    assert texts().keys() == CATALOGUE.keys()
    for name, text in pages().items():
        assert (HERE / name).read_text(encoding="utf-8") == text, (
            "python -m docs.remedies"
        )
    assert {path.name for path in HERE.glob("*.md")} == pages().keys()


def test_pages_say_which_remedies_preserve_the_function() -> None:
    for name, kind in REMEDIES.items():
        made = remedy(name, to="sink") if name == "normaliser" else kind()
        assert texts()[name][3].startswith("yes") == made.preserves_function, name


def test_the_command_lists_every_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["remedies", "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == list(CATALOGUE)
    assert all(one["does"] and one["fits"] and one["code"] for one in listed)
    with pytest.raises(SystemExit):
        main(["remedies"])
    assert "group_learning_rates" in capsys.readouterr().out


def found(rule: str, severity: str = "warn", **evidence: str) -> Finding:
    return Finding(step=9, severity=severity, code=rule, message="…", params=evidence)


def offered_for(verdict: Verdict) -> list[str]:
    return [entry.name for entry in remedies_for(verdict)]


def test_the_cause_comes_before_what_it_does_to_the_loss() -> None:
    findings = (
        found("loss.risen", "error"),
        found("attention.sinks", "info"),
        found("forecast.failure", cause="adam"),  # of a file of before
        found("update.too_large"),
    )
    verdict = Verdict(state="failing", sentence="…", findings=findings)
    names = offered_for(verdict)
    assert names[:2] == ["learning_rate", "update_clip"]
    assert "normaliser" not in names
    assert names.index("update_clip") < names.index("roll_back")
    dead = Verdict(
        state="dead", sentence="…", findings=(found("nonfinite.loss", "error"),)
    )
    assert offered_for(dead)[0] == "roll_back"
    healthy = Verdict(state="healthy", sentence="…", findings=findings)
    assert remedies_for(healthy) == []


def test_the_lines_for_a_run_that_fails_can_be_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "failing.eqp"
    failing_run(path, steps=200)
    with pytest.raises(SystemExit):
        main(["remedy", str(path), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["state"] in ("at risk", "failing", "dead") and shown["remedies"]
    model = a_model("lab")
    names = {"model": model, "optimizer": an_optimizer(model)}
    first = shown["remedies"][0]
    if not first["name"].endswith("_init"):  # which are for before training
        train(model, names["optimizer"])
    torch.save(snapshot(model, names["optimizer"]), "last.pt")
    exec(first["code"], names)  # noqa: S102
    assert names["undo"].active
    with pytest.raises(SystemExit):
        main(["remedy", str(path)])
    text = capsys.readouterr().out
    assert f"try first: {first['name']}" in text
    assert all(f"    {line}" in text for line in first["code"].splitlines())


def test_what_is_applied_to_a_watched_model_is_in_its_run(tmp_path: Path) -> None:
    model = a_model("lab")
    optimizer = an_optimizer(model)
    run = tmp_path / "run.eqp"
    with equipoise.watch(model, optimizer, run=run, every=2, quiet=True):
        train(model, optimizer, 2)
        undo = remedy("gradient_clip", limit=0.5).apply(model, optimizer)
        train(model, optimizer, 2)
        undo()
    remedy("gradient_clip").apply(model, optimizer)
    applied = equipoise.open_run(run).applied
    found = [(one.step, one.remedy, one.undone) for one in applied]
    assert found == [(2, "gradient_clip", False), (4, "gradient_clip", True)]
    assert applied[0].details == {"limit": 0.5}


def test_a_watched_model_with_a_remedy_is_free_when_it_is_dropped(
    tmp_path: Path,
) -> None:
    model = a_model("lab")
    optimizer = an_optimizer(model)
    handle = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", quiet=True)
    undo = remedy("temperature").apply(model, optimizer)
    gone = weakref.ref(model)
    handle.close()
    del model, optimizer, undo, handle
    gc.collect()
    assert gone() is None
