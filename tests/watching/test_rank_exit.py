"""One of two ranks is killed: the other ends by itself, and the run is whole."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import equipoise
from equipoise.store import RunWriter
from equipoise.watching import start
from equipoise.watching.ranks.group import SingleRank
from equipoise.watching.ranks.merge import RankSample
from tests.conftest import PATIENCE
from tests.watching.models import TinyModel, batches, hooks_on, objective
from tests.watching.rank_exit import free_port

ROOT = Path(__file__).parents[2]
STEPS = 4


@pytest.mark.parametrize("victim", [0, 1])
def test_the_remaining_rank_trains_on(victim: int, tmp_path: Path) -> None:
    run, port = tmp_path / "a.eqp", free_port()
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.watching.rank_exit",
                str(rank),
                port,
                str(run),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for process in ranks:
        assert process.stdout is not None
        committed = [process.stdout.readline() for _ in range(STEPS)]
        assert committed == [f"{step}\n" for step in range(STEPS)]
    ranks[victim].kill()
    survivor = ranks[1 - victim]
    _, errors = survivor.communicate(timeout=PATIENCE)
    ranks[victim].communicate()
    assert survivor.returncode == 1, "the training's own exception ends it"
    assert "RuntimeError" in errors or "DistBackendError" in errors
    file = equipoise.open_run(run)
    for quantity, site in (("loss", ""), ("attention.theta.p50", "blocks.0.attention")):
        steps = file.series(quantity)[site][0].tolist()
        assert steps[:STEPS] == list(range(STEPS))
    RunWriter(run, file.info).close()  # nobody holds the file any more
    # The first rank writes: if it was killed, its file ends where it died.
    assert [f.code for f in file.findings] == ["watch.rank_lost"] * victim


class RankLost(SingleRank):
    """The first of two ranks, whose other dies in the third exchange."""

    count = 2

    def __init__(self) -> None:
        super().__init__()
        self.exchanges = 0

    def exchange(self, message: RankSample) -> list[RankSample]:
        self.exchanges += 1
        if self.exchanges > 2:
            raise RuntimeError("connection closed by peer")
        return [message, message]


def test_a_rank_that_exits_during_the_exchange_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "connect_ranks", RankLost)
    run, model = tmp_path / "a.eqp", TinyModel(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = equipoise.watch(model, optimizer, run=run, every=1)
    for batch in batches(6):
        objective(model, batch).backward()
        optimizer.step()
    handle.close()
    assert hooks_on(model) == 0
    file = equipoise.open_run(run)
    assert list(file.series("gradient.norm")["head"][0]) == [0, 1, 3, 4, 5]
    (found,) = [f for f in file.findings if f.belongs_to("watch")]
    assert (found.code, found.step) == ("watch.rank_lost", 2)
