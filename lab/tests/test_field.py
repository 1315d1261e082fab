"""The field: its manifests are fixed, its units run, what is kept judges as the run."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from equipoise.cli.arguments import with_targets
from equipoise.errors import InputError
from equipoise.records import Finding
from equipoise_lab.commands import storms
from equipoise_lab.storms.field import (
    architectures,
    bars,
    faults,
    judged,
    lock,
    making,
    manifest,
    tasks,
    training,
)
from equipoise_lab.storms.field.recording import Recorded, read, write

PARTS: tuple[architectures.Part, ...] = ("open", "locked")


@pytest.mark.parametrize("part", PARTS)
def test_a_manifest_is_what_its_seed_draws(part: architectures.Part) -> None:
    assert manifest.path(part).read_text(encoding="utf-8") == manifest.written(part)


def test_the_locked_part_is_large_and_has_kinds_of_its_own() -> None:
    opened, locked = manifest.units("open"), manifest.units("locked")
    assert sum(not u.fault for u in locked) >= 120
    assert sum(bool(u.fault) for u in locked) >= 80
    for kind in ("architecture", "task", "optimiser", "schedule", "fault"):
        here = {getattr(u, kind) for u in opened} - {""}
        there = {getattr(u, kind) for u in locked} - {""}
        assert not here & there, kind
    assert len({u.architecture for u in opened}) >= 12
    assert len({u.optimiser for u in opened}) >= 6
    assert len({u.schedule for u in opened}) >= 6


@pytest.mark.parametrize("part", PARTS)
def test_a_fault_differs_from_its_twin_in_the_fault_alone(
    part: architectures.Part,
) -> None:
    units = {u.name: u for u in manifest.units(part)}
    faulty = [u for u in units.values() if u.fault]
    for unit in faulty:
        plain = replace(unit, name=unit.twin, fault="", onset=0, severity=0.0, twin="")
        assert plain == units[unit.twin]
    late = [u for u in faulty if not faults.FAULTS[u.fault].at_start]
    assert len({u.onset / u.steps for u in late}) > len(late) // 2


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_a_batch_is_the_same_for_the_same_step(name: str) -> None:
    task = tasks.TASKS[name]
    for vocabulary in task.vocabularies:
        x, y = task.batch(3, 5, 2, 32, vocabulary)
        again, _ = task.batch(3, 5, 2, 32, vocabulary)
        other, _ = task.batch(3, 6, 2, 32, vocabulary)
        assert torch.equal(x, again) and not torch.equal(x, other)
        assert 0 <= int(y.max()) < vocabulary


def _short(fault: str = "") -> manifest.Unit:
    """Return a small unit; the open part's first decoder under one optimiser."""
    found = next(u for u in manifest.units("open") if u.architecture == "nano")
    return replace(
        found,
        task="chain",
        vocabulary=16,
        length=16,
        batch=4,
        optimiser="adamw",
        trained=0,
        steps=24,
        warmup=0.0,
        fault=fault,
        onset=12 if fault else 0,
        severity=0.5,
    )


def test_a_fault_starts_at_its_step_and_not_before() -> None:
    healthy, wrong = (training.run(_short(f), watched=False) for f in ("", "rate jump"))
    assert healthy.losses[:13] == wrong.losses[:13]
    assert healthy.losses[13:] != wrong.losses[13:]


def test_watching_a_unit_changes_nothing() -> None:
    assert training.run(_short()).losses == training.run(_short(), watched=False).losses


def test_what_is_kept_is_what_was_recorded(tmp_path: Path) -> None:
    recorded = training.run(_short())
    write(tmp_path / "unit.field", recorded)
    found = read(tmp_path / "unit.field")
    assert len(found.readings) == len(recorded.readings) > 20
    for kept, given in zip(found.readings, recorded.readings, strict=True):
        assert (kept.step, kept.quantity, kept.sites) == (
            given.step,
            given.quantity,
            given.sites,
        )
        for row, values in zip(kept.values, given.values, strict=True):
            assert row == pytest.approx(values, rel=2e-5, nan_ok=True)
    assert found.findings == recorded.findings
    assert found.details == recorded.details


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "unit.field"
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="unit.field is damaged"):
        read(path)


def _recorded(name: str, losses: Sequence[float], validation: float) -> Recorded:
    return Recorded(
        unit=name,
        losses=losses,
        validation=validation,
        details={},
        readings=[],
        findings=[],
    )


FALLING = [5.0 - 0.03 * step for step in range(100)]


@pytest.mark.parametrize(
    ("validation", "expected"),
    [(2.06, "survived"), (2.09, "between"), (2.2, "failed"), (math.inf, "failed")],
)
def test_what_became_of_a_fault_is_told_by_the_loss_beside_its_twin(
    validation: float, expected: str
) -> None:
    unit = _short("rate jump")
    twin = _recorded("twin", FALLING, 2.04)
    found = judged.outcome(unit, _recorded(unit.name, FALLING, validation), twin)
    assert found == expected


def test_a_solved_task_has_not_failed_by_a_hundredth_of_a_nat() -> None:
    twin = _recorded("twin", FALLING, 0.001)
    close = _recorded("close", FALLING, 0.009)
    assert judged.outcome(_short("rate jump"), close, twin) == "survived"


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (FALLING, "healthy"),
        ([5.0] * 100, "void"),
        (FALLING[:50] + FALLING[:50][::-1], "void"),
        ([*FALLING[:99], math.nan], "void"),
    ],
)
def test_a_run_that_learnt_nothing_or_came_back_up_is_not_called_healthy(
    losses: list[float], expected: str
) -> None:
    unit = _short()
    assert judged.outcome(unit, _recorded(unit.name, losses, 2.0), None) == expected


def _one(**changed: Any) -> judged.Judged:
    return judged.Judged(
        **{
            "unit": _short(),
            "outcome": "healthy",
            "shown": None,
            "warnings": (),
            "state": "healthy",
            "headline": "",
            **changed,
        }
    )


def test_warnings_before_the_fault_do_not_count_as_naming_it() -> None:
    early, late = (Finding.warn(step, "update.too_large") for step in (3, 20))
    unit = replace(_short("rate jump"), onset=12)
    failed = {"unit": unit, "outcome": "failed", "shown": 60}
    before = _one(**failed, warnings=(early,), headline="update.too_large")
    after = _one(**failed, warnings=(early, late), headline="gradient.spike")
    wrong = _one(**failed, headline="residual.embedding_large")
    found = {share.what: share for share in bars.counts([before, after, wrong]).shares}
    assert found["failing units named"].count == 1
    assert after.lead == 40 and before.lead is None
    assert [one.cause for one in (before, after, wrong)] == ["right", "none", "wrong"]


def test_an_error_of_a_rule_is_counted_beside_what_became_of_the_unit() -> None:
    wrong = (Finding.error(30, "loss.risen"), Finding.warn(3, "check.x"))
    alone = _one(warnings=wrong[1:])
    found = {s.what: s for s in bars.counts([_one(warnings=wrong), alone]).shares}
    assert found["healthy units never warned by a rule"].count == 1
    assert found["units in which a rule said error that failed"].of == 1


def test_each_group_is_counted_by_itself_and_each_rule_by_its_units() -> None:
    warned = _one(warnings=(Finding.warn(3, "gradient.spike"),) * 2)
    found = bars.counts([warned, _one(unit=replace(_short(), architecture="gpt2"))])
    rows = {name: row[0].count for name, row in found.groups["architecture"].items()}
    assert rows == {"gpt2": 0, "nano": 1}
    assert found.alarms == (2, 48)
    assert list(found.by_rule) == ["gradient.spike"]
    assert len(found.by_rule["gradient.spike"]) == 1


def test_the_locked_part_opens_once(tmp_path: Path) -> None:
    units = [replace(_short(), part="locked", name="a")]
    told: list[str] = []
    assert lock.open_once(units, tmp_path, told.append, "abc").shares
    lines = (tmp_path / lock.LOG).read_text().splitlines()
    assert [set(json.loads(line)) - {"at"} for line in lines] == [
        {"opened", "units", "left out"},
        {"counts"},
    ]
    said = [json.loads(one) for one in (tmp_path / lock.UNITS).open()]
    assert [one["unit"] for one in said] == ["a"] and "warned" in said[0]
    assert len(told) == 1 and "loss" not in told[0]
    with pytest.raises(InputError, match="opened before"):
        lock.open_once(units, tmp_path, told.append, "abc")
    assert (tmp_path / lock.LOG).read_text().splitlines() == lines


def test_what_is_recorded_can_be_judged_alone_and_the_log_says_so(
    tmp_path: Path,
) -> None:
    units = [replace(_short(), part="locked", name=name) for name in "ab"]
    making.make(units[:1], tmp_path, lambda line: None)
    lock.open_once(units, tmp_path, print, "abc", recorded=True)
    first = json.loads((tmp_path / lock.LOG).read_text().splitlines()[0])
    assert (first["units"], first["left out"]) == (1, ["b"])
    assert not (tmp_path / "locked" / "b.field").exists()


def test_a_refused_unit_leaves_the_lock_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(unit: manifest.Unit) -> Recorded:
        return replace(_recorded(unit.name, [], math.inf), refused="no optimiser")

    monkeypatch.setattr("equipoise_lab.storms.field.making.run", refused)
    units = [replace(_short(), part="locked", name="a")]
    with pytest.raises(InputError, match="the lock still holds"):
        lock.open_once(units, tmp_path, print, "abc")
    lock.refuse_if_opened(tmp_path)


def test_the_command_judges_what_is_recorded(tmp_path: Path) -> None:
    runner, asked = CliRunner(), ["--tier", "field", "--judge-only"]
    words = with_targets([*asked, "--records", str(tmp_path), "--json"])
    found = runner.invoke(storms.app, words)
    assert found.exit_code == 0, found.output
    shares = {one["what"]: one for one in json.loads(found.stdout)["shares"]}
    assert shares["cause right"]["of"] == 0
    shown = runner.invoke(storms.app, [*asked, "--records", str(tmp_path)])
    assert "healthy units" in shown.output and "0 of 0" in shown.output
