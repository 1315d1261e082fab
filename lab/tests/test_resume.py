"""Killed at any moment, resumed, and nobody can tell from the weights."""

import multiprocessing
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from equipoise.numerics.rows.statistics import row_statistics
from equipoise.store import open_run
from lab.tests import killed_training
from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[2]
# Micro-batches 1 … 2·STEPS: the moment of death falls inside accumulations too.
KILLS = sorted(random.Random(5).sample(range(1, 2 * killed_training.STEPS), 5))
Start = tuple[int, str]
"""How many processes, and how they share the model."""
ALONE, DDP, FSDP = (1, "ddp"), (2, "ddp"), (2, "fsdp")


def train(
    folder: Path, start: Start, die_at: int = -1, *, watch: bool = False
) -> list[int | None]:
    """Train in forked processes (torch is imported already); return exit codes."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    fork = multiprocessing.get_context("fork")
    members = [
        fork.Process(target=member, args=(rank, port, start, folder, die_at, watch))
        for rank in range(start[0])
    ]
    for process in members:
        process.start()
    for process in members:
        process.join(PATIENCE)
    return [process.exitcode for process in members]


def member(
    rank: int, port: str, start: Start, folder: Path, die_at: int, watch: bool
) -> None:
    world, parallel = start
    if world > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    killed_training.main(folder, die_at, parallel, watch=watch)


def final(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "final.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> dict[Start, Path]:
    folders = {s: tmp_path_factory.mktemp("unharmed") for s in (ALONE, DDP, FSDP)}
    for start, folder in folders.items():
        assert set(train(folder, start)) == {0}
    return folders


# All fifteen pairs pass; a start costs seconds, so the groups keep fewer here.
@pytest.mark.parametrize(
    ("start", "die_at"),
    [*((ALONE, at) for at in KILLS), (DDP, KILLS[1]), (FSDP, KILLS[3])],
)
def test_resumes_exactly(
    start: Start, die_at: int, unharmed: dict[Start, Path], tmp_path: Path
) -> None:
    assert set(train(tmp_path, start, die_at)) == {-9}
    assert not (tmp_path / "final.safetensors").exists()
    assert set(train(tmp_path, start)) == {0}
    assert same(final(tmp_path), final(unharmed[start]))


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile the kernels here, once: forked children then find them ready."""
    row_statistics(torch.zeros(1, 1, 4, 4))


# Micro-batch 7 is before the first checkpoint, 23 after the second.
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("start", "die_at"), [(ALONE, 7), (DDP, 23)])
def test_a_watched_run_continues_where_its_weights_do(
    start: Start, die_at: int, unharmed: dict[Start, Path], tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert set(train(whole, start, watch=True)) == {0}
    assert set(train(killed, start, die_at, watch=True)) == {-9}
    assert set(train(killed, start, watch=True)) == {0}
    assert same(final(killed), final(unharmed[start]))
    ours, theirs = (open_run(folder / "run.eqp") for folder in (killed, whole))
    assert ours.steps.tolist() == list(range(killed_training.STEPS))
    assert ours.quantities == theirs.quantities
    for quantity in ("loss", "learning_rate", "gradient.norm", "attention.theta.mean"):
        for site, (steps, values) in theirs.series(quantity).items():
            again, found = ours.series(quantity)[site]
            assert again.tolist() == steps.tolist(), quantity
            assert found.tolist() == values.tolist(), quantity


def test_torchrun_changes_nothing(unharmed: dict[Start, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "lab.tests.killed_training"]
    environment = {**os.environ, "PYTHONPATH": "src:.", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, str(tmp_path), "-1", "ddp"],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    assert same(final(tmp_path), final(unharmed[DDP]))


def test_sharding_changes_nothing_but_rounding(unharmed: dict[Start, Path]) -> None:
    ddp, fsdp = final(unharmed[DDP]), final(unharmed[FSDP])
    # The same sums in another order, carried through 24 steps of Adam.
    for name in ddp:
        torch.testing.assert_close(fsdp[name], ddp[name], rtol=0, atol=1e-4)


def test_a_checkpoint_of_another_number_of_processes(
    unharmed: dict[Start, Path],
) -> None:
    assert train(unharmed[DDP], ALONE) == [1]


def test_dying_while_writing_leaves_the_older_checkpoint(
    unharmed: dict[Start, Path],
) -> None:
    kept = sorted(p.name for p in (unharmed[ALONE] / "checkpoints").iterdir())
    assert kept == ["step-00000015", "step-00000020"]
