"""One line on attaching, one on closing, told once."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import equipoise
from equipoise.probes.capture import PassCoverage
from equipoise.watching import Watch
from equipoise.watching.step.machine import Step
from equipoise.watching.step.pipeline import write_rest
from tests.watching.models import TinyModel


def watched(path: Path, *, quiet: bool = False) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    equipoise.watch(model, optimizer, run=path / "a.eqp", quiet=quiet).close()


def test_lines_reach_stderr_of_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched(tmp_path)
    first, last = capsys.readouterr().err.splitlines()  # pytest's stderr is no terminal
    assert first.startswith("equipoise watching 2 attention sites of ")
    assert first.endswith(f"equipoise report {tmp_path / 'a.eqp'}")
    assert last.startswith("equipoise 0 steps watched, not judged: 0 sampled")


def test_the_option_quiet_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched(tmp_path, quiet=True)
    assert not capsys.readouterr().err


def test_a_configured_log_gets_each_line_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="equipoise"):
        watched(tmp_path)
    printed = [r.message for r in caplog.records if "watch" in r.message]
    assert (
        len(printed) == 2 and "sites" in printed[0] and "0 steps watched" in printed[1]
    )
    assert not capsys.readouterr().err


def test_a_forked_child_leaves_its_parents_run_alone() -> None:
    closed: list[bool] = []
    recorder: Any = SimpleNamespace(close=lambda orderly: closed.append(orderly))
    write_rest(recorder, os.getpid() + 1)
    assert not closed
    write_rest(recorder, os.getpid())
    assert closed == [False]


@pytest.mark.parametrize("late", [False, True])
def test_devices_wait_for_a_sample_when_the_next_step_ends(late: bool) -> None:
    done: list[str] = []
    recorder = SimpleNamespace(
        scalars=None,
        ranks=SimpleNamespace(count=2),
        send=lambda step, readings: done.append("sent"),
    )
    handle: Any = SimpleNamespace(
        _recorder=recorder,
        _sampler=SimpleNamespace(late=late, finish=lambda step, also: None),
        _write_arrived=lambda wait: done.append("written"),
        _follow_modules=lambda step: None,
        autopilot=None,
    )
    step = Step(3, coverage=PassCoverage())
    Watch._finish(handle, step)
    Watch._write(handle, step)
    assert done == ["written", "sent", "written"][: 2 if late else 3]
