"""Kernels are compiled at attach, announced by one line, once per installation."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from equipoise.numerics import token_statistics
from equipoise.numerics.rows import ladder, statistics, steps
from equipoise.numerics.rows.balance import balance
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


def test_no_kernel_is_compiled_twice() -> None:
    """Slices for threads, causal blocks and whole efforts need no code of their own."""
    z = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for found in (statistics.row_columns(z), statistics.row_columns(z[:1])):
            assert found.isfinite().all()
        statistics.row_columns(z, causal_from=0)
        token_statistics.token_sizes(z)
        token_statistics.token_sizes(z[:2])
        for effort in (2, 2.0):
            balance(torch.tensor([[0.4, 0.35, 0.25]]), effort=effort)
            balance(torch.ones(3, 27).double() / 27, effort=effort)
            balance((0.3 * z[:, :30].double()).softmax(-1), effort=effort, witness=True)
    finally:
        torch.set_num_threads(threads)
    kernels = statistics.read_rows, token_statistics._sizes
    ladders = ladder.close, steps.sorted_rows
    for kernel in (*kernels, *ladders):
        assert len(kernel.signatures) == 1  # type: ignore[attr-defined]


def test_type_checkers_know_every_option() -> None:
    """``watch(model, evry=3)`` is refused by the TypedDict, which must be complete.

    ``forecast`` is accepted, with a warning, and ignored.
    """
    options = {f.name for f in fields(WatchOptions)}
    assert set(WatchArguments.__annotations__) == {*options, "forecast"}
