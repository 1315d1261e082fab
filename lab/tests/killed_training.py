"""A training process that may kill itself: run by ``test_resume``, alone or torchrun.

usage: python -m lab.tests.killed_training FOLDER DIE_AT PARALLEL
"""

import os
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from equipoise_lab.data import Batch, RankShare, Windows, from_bytes
from equipoise_lab.models import GPT, GPTConfig
from equipoise_lab.training.checkpoint import full_weights
from equipoise_lab.training.distributed import process_group
from equipoise_lab.training.options import TrainOptions
from equipoise_lab.training.trainer import Trainer

STEPS = 24
# No key bias: softmax ignores it, so Adam would blow up the rounding of its gradient.
CONFIG = GPTConfig(width=16, depth=2, heads=2, context=16, dropout=0.1, qkv_bias=False)
OPTIONS = TrainOptions(
    steps=STEPS, batch=2, accumulation=2, warmup=4, checkpoint_every=5, watch=False
)
WATCH = {"watch": True, "every": 4, "preset": "minimal"}


class Fatal(Windows):
    """Data whose ``die_at``-th batch kills the process, as the kernel would."""

    die_at = -1

    def take(self) -> Batch:
        if self.order.position == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().take()


def main(folder: Path, die_at: int, parallel: str, *, watch: bool = False) -> None:
    torch.set_num_threads(1)
    with process_group() as share:
        trainer = Trainer(
            seeded_model(),
            dying_data(share, die_at),
            TrainOptions(
                **{**vars(OPTIONS), "parallel": parallel, **(WATCH if watch else {})}
            ),
            folder=folder,
        )
        trainer.run()
        weights = full_weights(trainer.model)
        if share.rank == 0:
            save_file(weights, folder / "final.safetensors")


def seeded_model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def dying_data(share: RankShare, die_at: int) -> Fatal:
    corpus = from_bytes(bytes(range(256)) * 20)
    data = Fatal(corpus, context=16, batch=2, seed=1, share=share)
    data.die_at = die_at
    return data


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
