"""What a user reads: pages, the two commands, and the records of a watched run."""

import gc
import json
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import equipoise
from docs.remedies import HERE, packaged, pages, texts
from equipoise.cli import main
from equipoise.cli.remedy import remedies_for
from equipoise.judging import remedy_catalogue
from equipoise.judging.causes import REMEDIES as FAMILY_REMEDIES
from equipoise.judging.remedy_catalogue import (
    BACK,
    CATALOGUE,
    HALVED,
    Cell,
    RemedyEntry,
    offered,
    rescues,
)
from equipoise.judging.rules import load_rules
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
    return [entry.name for entry, _ in remedies_for(verdict)]


def test_the_cause_comes_before_what_it_does_to_the_loss() -> None:
    findings = (
        found("loss.risen", "error"),
        found("attention.sinks", "info"),
        found("forecast.failure", cause="adam"),
        found("update.too_large"),
    )
    verdict = Verdict(state="failing", sentence="…", findings=findings)
    names = offered_for(verdict)
    assert names[:2] == ["beta2", "optimizer_reset"]
    assert "update_clip" in names and "normaliser" not in names
    assert names.index("update_clip") < names.index("roll_back")
    findings = found("gradient.exploding"), found("residual.growing")
    names = offered_for(replace(verdict, findings=findings))
    assert names.index("weight_cap") < names.index("gradient_clip"), "not measured"
    dead = Verdict(
        state="dead", sentence="…", findings=(found("nonfinite.loss", "error"),)
    )
    assert offered_for(dead)[0] == "roll_back"
    healthy = Verdict(state="healthy", sentence="…", findings=findings)
    assert remedies_for(healthy) == []


def test_the_packaged_table_is_the_benchmarks() -> None:
    path = Path(remedy_catalogue.__file__).with_name("rescues.json")
    assert path.read_text() == packaged(), "python -m docs.remedies"


def test_what_is_offered_first_is_better_than_half_the_rate() -> None:
    """For every family, and for every rule that tells one, by the file of results."""
    told = {(r.storms, r.remedies) for r in load_rules().values() if r.storms}
    assert len({family for family, _ in told}) >= 8
    for family, names in [*FAMILY_REMEDIES.items(), *told]:
        first, *_ = offered(names, family)
        half, cell = rescues()[HALVED][family], first.best(family)
        assert cell is not None, family
        halved = first.does == "start again at half the learning rate"
        assert halved or cell.better > half.better, family


def cell(rescued: int, tried: int = 5, closed: float = 0.5) -> Cell:
    return Cell(rescued=rescued, tried=tried, closed=closed)


TABLE = {
    HALVED: {"ramp": cell(2), "adam": cell(0, closed=-0.2)},
    "learning_rate": {"ramp": cell(0, closed=0.3)},
    f"{BACK}learning_rate(scale=0.1)": {"ramp": cell(1, closed=0.9)},
    "update_clip": {"ramp": cell(2, closed=0.4)},
    "optimizer_reset": {"ramp": cell(0, closed=-0.1)},
    f"{BACK}skip_step(always=True)": {"ramp": cell(1), "adam": cell(4)},
}
NAMES = ("optimizer_reset", "qk_norm", "skip_step", "update_clip", "learning_rate")


def offers(
    changed: Mapping[str, dict[str, Cell]], family: str = "ramp"
) -> list[RemedyEntry]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remedy_catalogue, "rescues", lambda: TABLE | dict(changed))
        return offered(NAMES, family)


def named(entries: list[RemedyEntry]) -> list[str]:
    return [entry.name for entry in entries]


def test_offers_follow_the_table() -> None:
    """By what was rescued; not tried: after it; harm: left out; ties: half first."""
    order = ["learning_rate", "update_clip", "skip_step", "qk_norm"]
    assert named(offers({})) == order
    tie = offers({"update_clip": {"ramp": cell(2)}})
    assert named(tie) == order, "not better than half the rate"
    better = offers({"update_clip": {"ramp": cell(3, closed=0.1)}})
    assert named(better) == ["update_clip", "learning_rate", "skip_step", "qk_norm"]
    unsure = offers({"update_clip": {"ramp": cell(1, tried=2)}})
    assert named(unsure)[0] == "learning_rate", "1 of 2 is less sure than 2 of 5"
    assert named(offers({}, "adam"))[0] == "skip_step"
    assert named(offers({}, "unknown")) == list(NAMES)
    nothing = offers({f"{BACK}skip_step(always=True)": {}}, "adam")
    assert named(nothing)[0] == "learning_rate", "half, where nothing is better"


def test_a_remedy_is_offered_in_the_form_that_did_best() -> None:
    half, _, back, _ = offers({})
    assert half.does == "start again at half the learning rate"
    assert 'remedy("learning_rate", scale=0.5, warmup=0)' in half.code
    lines = back.code.splitlines()
    assert lines[1].startswith('remedy("roll_back"') and len(lines) == 3
    assert 'remedy("skip_step", always=True)' in lines[2] and "# undo()" in lines[2]
    assert back.does.endswith("then skip_step(always=True)")
    after = {f"{BACK}learning_rate(scale=0.1)": {"ramp": cell(4, closed=0.9)}}
    first = offers(after)[0]
    assert "scale=0.1" in first.code and "roll_back" in first.code
    assert str(cell(4)) == "4 of 5 (38–96 %)"


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
