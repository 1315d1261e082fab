"""kill -9 in the middle of a watched training: what was committed is there."""

import subprocess
import sys
from pathlib import Path

import equipoise

KILLS, AFTER = 5, (3, 7, 1, 12, 5)
ROOT = Path(__file__).parents[2]


def killed(run: Path, after: int) -> int:
    """Return the last step the victim had committed when it was killed."""
    command = [sys.executable, "-m", "tests.watching.killed_process", str(run)]
    victim = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    seen = [int(victim.stdout.readline()) for _ in range(after)]
    victim.kill()
    rest = victim.stdout.read().split("\n")
    victim.wait()
    # The last line may have been cut in the middle.
    return int(rest[-2]) if len(rest) > 1 else seen[-1]


def test_every_committed_reading_survives(tmp_path: Path) -> None:
    run = tmp_path / "a.eqp"
    last = -1
    for after in AFTER[:KILLS]:
        committed = killed(run, after)
        assert committed > last, "the run goes on where it was killed"
        file = equipoise.open_run(run)
        steps = set(file.series("attention.entropy")["blocks.0.attention"][0].tolist())
        assert steps >= set(range(committed + 1))
        assert {0, committed} <= set(file.series("loss")[""][0].tolist())
        last = committed
