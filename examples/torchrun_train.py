"""Train alone, or on many processes, with the same file.

    python examples/torchrun_train.py
    FOLDER=out torchrun --nproc-per-node 2 examples/torchrun_train.py

Killed and started again with the same folder, it continues where its newest checkpoint
stands. ``PARALLEL=fsdp`` shards the model in place of copying it.
"""

import os
import tempfile
from pathlib import Path

import torch

from equipoise import open_run
from equipoise_lab.data import Windows, embedded
from equipoise_lab.models import GPT, GPTConfig
from equipoise_lab.training import distributed as launch
from equipoise_lab.training.options import TrainOptions
from equipoise_lab.training.trainer import Trainer

CONFIG = GPTConfig(width=32, depth=2, heads=2, context=32)
OPTIONS = TrainOptions(
    steps=20,
    warmup=2,
    every=5,
    checkpoint_every=10,
    parallel="fsdp" if os.environ.get("PARALLEL") == "fsdp" else "ddp",
)


def main(folder: Path) -> None:
    with launch.process_group() as share:
        torch.manual_seed(0)
        data = Windows(embedded(), context=32, batch=4, share=share)
        result = Trainer(GPT(CONFIG), data, OPTIONS, folder=folder).run()
        if share.rank == 0:
            recorded = open_run(folder / "run.eqp")
            print(f"loss {result.losses[0]:.2f} → {result.losses[-1]:.2f}")
            assert result.losses[-1] < result.losses[0]
            assert len(recorded.series("gradient.norm")["blocks.0"][0]) == 4


if __name__ == "__main__":
    place = os.environ.get("FOLDER")
    if place:
        main(Path(place))
    else:
        assert "RANK" not in os.environ, "under torchrun give FOLDER, one for all"
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
