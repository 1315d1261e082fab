"""Two ranks, one of which leaves out a step: ``-m tests.watching.skipped_step``.

Arguments: RANK PORT FOLDER. Writes what the rank saw as JSON.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import equipoise
from equipoise.watching.ranks import group as ranks
from tests.watching.models import batches, objective
from tests.watching.two_ranks import half, without_batch_norm

STEPS, SKIPPED = 8, 3


def main() -> None:
    rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ranks.EXCHANGE_TIMEOUT_S = 2.0
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(without_batch_norm())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = equipoise.watch(model, optimizer, run=folder / "a.eqp", every=2)
    sums = []
    for step, batch in enumerate(batches(STEPS)):
        objective(model, half(batch)).backward()
        if (rank, step) != (1, SKIPPED):
            optimizer.step()
        optimizer.zero_grad()
        total = torch.ones(1)  # a collective of the user's own
        dist.all_reduce(total)
        sums.append(total.item())
    handle.close()
    found = [finding.code for finding in handle.findings]
    report = {"sums": sums, "findings": found, "closed": handle.closed}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
