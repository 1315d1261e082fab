"""Handles that nobody closed: the tail is written, and nothing stays open."""

import gc
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import equipoise
from equipoise.errors import RunFileError
from equipoise.store import RunWriter
from tests.watching.models import TinyModel, batches, objective

STEPS = 60


def cell(run: Path, *, steps: int = STEPS) -> None:
    """A notebook's cell, or a function of a sweep: the handle goes out of scope."""
    model = TinyModel(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = equipoise.watch(model, optimizer, run=run, every=100, quiet=True)
    for batch in batches(steps):
        objective(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not handle.closed


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_a_dropped_handle_writes_its_tail_and_leaves_nothing_open(
    tmp_path: Path,
) -> None:
    cell(tmp_path / "warm.eqp", steps=1)
    gc.collect()
    before, threads = descriptors(), threading.active_count()
    for i in range(4):
        cell(tmp_path / f"{i}.eqp")
    gc.collect()
    assert (descriptors(), threading.active_count()) == (before, threads)
    assert not list(tmp_path.glob("*.lock")) and not list(tmp_path.glob("*-wal"))
    for i in range(4):
        steps, _ = equipoise.open_run(tmp_path / f"{i}.eqp").series("loss")[""]
        assert list(steps) == [*range(STEPS)]


def test_a_cell_that_is_run_again_continues_its_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = []
    for _ in range(3):
        model = TinyModel(depth=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = tmp_path / "a.eqp"
        with caplog.at_level(logging.WARNING, "equipoise"):
            kept.append(equipoise.watch(model, optimizer, run=run, every=1))
        for batch in batches(2):
            objective(model, batch).backward()
            optimizer.step()
    assert [handle.closed for handle in kept] == [True, True, False]
    kept[-1].close()
    steps, _ = equipoise.open_run(tmp_path / "a.eqp").series("loss")[""]
    assert list(steps) == [*range(6)]
    assert sum(".close()" in record.message for record in caplog.records) == 2


def test_a_writer_of_this_process_is_named_as_such(tmp_path: Path) -> None:
    model = TinyModel(depth=1)
    with equipoise.watch(model, run=tmp_path / "a.eqp") as handle:
        with pytest.raises(RunFileError, match=r"this process: call \.close\(\)"):
            RunWriter(handle.path)


RANDOM = """
import random, sys
import torch, numpy
from pathlib import Path
random.seed(1); numpy.random.seed(1); torch.manual_seed(1)
model = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0)
optimizer = torch.optim.AdamW(model.parameters())
before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
import equipoise
handle = equipoise.watch(model, optimizer, run=Path(sys.argv[1]), every=1)
for _ in range(2):
    model(torch.ones(1, 4, 8)).sum().backward()
    optimizer.step()
handle.close()
assert random.getstate() == before[0], "random"
assert numpy.random.get_state()[1].tolist() == before[1], "numpy"
assert torch.equal(torch.get_rng_state(), before[2]), "torch"
again = equipoise.watch(model, optimizer, run=Path(sys.argv[1]), every=1)
"""


def test_the_first_watch_of_a_process_draws_from_no_generator(tmp_path: Path) -> None:
    """And when Python ends while the run is open a second time, no error is printed.

    Two names of one file are compared then, when pathlib is no longer there. That the
    optimiser has stepped before is no sign of steps which were not seen.
    """
    command = [sys.executable, "-c", RANDOM, str(tmp_path / "a.eqp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "move" not in done.stderr, done.stderr
