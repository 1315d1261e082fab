"""One rank leaves out an optimizer.step(): training goes on, and the run says so."""

import json
import subprocess
import sys
from pathlib import Path

import equipoise
from tests.conftest import PATIENCE
from tests.watching.rank_exit import free_port
from tests.watching.skipped_step import STEPS

ROOT = Path(__file__).parents[2]


def test_training_continues_when_one_rank_leaves_out_a_step(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tests.watching.skipped_step"]
    processes = [
        subprocess.Popen([*command, str(rank), port, str(tmp_path)], cwd=ROOT)
        for rank in (0, 1)
    ]
    assert [process.wait(PATIENCE) for process in processes] == [0, 0]
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["sums"] == [2.0] * STEPS, "the user's collectives are not disturbed"
        assert seen["findings"].count("watch.rank_lost") == 1
    run = equipoise.open_run(tmp_path / "a.eqp")
    assert list(run.series("loss")[""][0]) == [*range(STEPS)]
    norms = run.series("gradient.norm")["head"]
    assert {0, 2} <= {*norms[0]} and max(norms[0]) > 4, "read alone from then on"
    (found,) = [f for f in run.findings if f.code == "watch.rank_lost"]
    assert found.params["case"] == "not_exchanged"
