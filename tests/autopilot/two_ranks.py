"""Two ranks with an autopilot, each with its own batches; what each did, as JSON.

Run as ``python -m tests.autopilot.two_ranks RANK PORT FOLDER``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import AdamW

import equipoise
from equipoise.anatomy.sharding import whole
from equipoise.autopilot.options import Autopilot, Proposal
from tests.models import GPT, GPTConfig
from tests.remedies.two_ranks import KINDS, step

CONFIG = GPTConfig(width=16, depth=1, heads=2, context=8, vocabulary=32)


def trained(kind: str, rank: int, folder: Path) -> dict[str, Any]:
    """Train at an absurd rate, so that the autopilot acts."""
    asked: list[int] = []

    def ask(proposal: Proposal) -> bool | None:
        asked.append(proposal.step)
        return None if len(asked) == 1 else True

    torch.manual_seed(0)
    model = KINDS[kind](GPT(CONFIG))
    optimizer = AdamW(model.parameters(), lr=3.0)
    rng = torch.Generator().manual_seed(rank)
    options = Autopilot(snapshot_every=2, apart=1, probation=2, ask=ask)
    with equipoise.watch(
        *(model, optimizer),
        run=folder / f"{kind}.eqp",
        every=1,
        quiet=True,
        strict=True,
        autopilot=options,
    ) as handle:
        for _ in range(14):
            step(model, optimizer, rng)
        pilot = handle.autopilot
    assert pilot is not None
    weights = {n: whole(p.detach()).tolist() for n, p in model.named_parameters()}
    snapshots = [s.step for s in pilot.snapshots.kept]
    log = [str(entry) for entry in pilot.log]
    return {"weights": weights, "log": log, "asked": asked, "snapshots": snapshots}


def main(rank: int, port: str, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = {kind: trained(kind, rank, folder) for kind in KINDS}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
