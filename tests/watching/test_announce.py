"""One line on attaching, one on closing, told once."""

import logging
from pathlib import Path

import pytest
import torch

import equipoise
from tests.watching.patients import Patient


def watched(path: Path, *, quiet: bool = False) -> None:
    model = Patient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    equipoise.watch(model, optimizer, run=path / "a.eqp", quiet=quiet).close()


def test_lines_reach_a_job_s_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched(tmp_path)
    first, last = capsys.readouterr().err.splitlines()  # pytest's stderr is no terminal
    assert first.startswith("equipoise watching 2 attention sites of ")
    assert first.endswith(f"equipoise report {tmp_path / 'a.eqp'}")
    assert last.startswith("equipoise 0 steps watched, nothing found")


def test_quiet_is_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched(tmp_path, quiet=True)
    assert not capsys.readouterr().err


def test_a_listener_hears_it_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="equipoise"):
        watched(tmp_path)
    said = [r.message for r in caplog.records if "watch" in r.message]
    assert len(said) == 2 and "sites" in said[0] and "0 steps watched" in said[1]
    assert not capsys.readouterr().err
