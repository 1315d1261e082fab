"""Under DDP and FSDP2 all ranks act alike, though only the first one is asked."""

from pathlib import Path

import equipoise
from tests.watching.single_process import run_ranks


def test_ranks_act_alike(tmp_path: Path) -> None:
    first, second = run_ranks("tests.autopilot.two_ranks", tmp_path, ranks=2)
    for kind in ("ddp", "fsdp"):
        one, other = first[kind], second[kind]
        assert one["weights"] == other["weights"], kind
        assert one["log"] == other["log"] and one["snapshots"] == other["snapshots"]
        assert "applied: back to step 0" in one["log"][1]
        assert len(one["asked"]) >= 2 and other["asked"] == []
        run = equipoise.open_run(tmp_path / f"{kind}.eqp")
        assert "learning_rate" in [applied.remedy for applied in run.applied]
        logged = [f for f in run.findings if f.code == "autopilot.applied"]
        assert len(logged) == 1  # by the first rank alone
