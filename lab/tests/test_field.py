"""The field: its manifests are fixed, its units run, what is kept judges as the run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equipoise.errors import InputError
from equipoise_lab.storms.field import architectures, faults, manifest, tasks, training
from equipoise_lab.storms.field.recording import read, write

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
