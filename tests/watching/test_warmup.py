"""Kernels are compiled at attach, announced by one line, once per installation."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from equipoise.watching import warmup
from equipoise.watching.options import WatchArguments, WatchOptions


def test_one_line_then_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "cache_folder", lambda: tmp_path / "kernels")
    lines: list[str] = []
    state = torch.get_rng_state()
    assert warmup.compile_kernels(lines.append) > 0
    assert lines == [warmup.NOTICE]
    assert warmup.compile_kernels(lines.append) == 0
    assert lines == [warmup.NOTICE]
    assert torch.equal(state, torch.get_rng_state())


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(warmup, "cache_folder", lambda: tmp_path / "file" / "kernels")
    lines: list[str] = []
    warmup.compile_kernels(lines.append)
    warmup.compile_kernels(lines.append)
    assert lines == [warmup.NOTICE] * 2


def test_type_checkers_know_every_option() -> None:
    """``watch(model, evry=3)`` is refused by the TypedDict, which must be complete."""
    assert set(WatchArguments.__annotations__) == {f.name for f in fields(WatchOptions)}
