"""One of two ranks that train: ``python -m tests.watching.rank_exit RANK PORT RUN``.

Prints each step when it is over, so that somebody can kill a rank in the middle.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import equipoise
from tests.watching.models import batches, objective
from tests.watching.two_ranks import half, without_batch_norm


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def main() -> None:
    rank, port, run = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(without_batch_norm())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = equipoise.watch(model, optimizer, run=run, every=1)
    while True:
        for batch in batches(50):
            objective(model, half(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            print(handle.current_step - 1, flush=True)


if __name__ == "__main__":
    main()
