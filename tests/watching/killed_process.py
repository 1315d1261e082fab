"""A training that is killed: ``python -m tests.watching.killed_process RUN``.

Prints each step after its readings were committed, for the killer to compare.
"""

import sys
from pathlib import Path

import torch

import equipoise
from tests.watching.models import TinyModel, batches, objective


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TinyModel(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = equipoise.watch(model, optimizer, run=Path(sys.argv[1]), every=1)
    while True:
        for batch in batches(50):
            objective(model, batch).backward()
            optimizer.step()
            print(handle.current_step - 1, flush=True)


if __name__ == "__main__":
    main()
