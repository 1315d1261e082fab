"""The trainer against the loop one would write by hand: tokens per CPU second.

Contestants, interleaved in one process, same shape and batch:
  bare      the lab's model in a loop of ten lines, fused AdamW, clipping
  trainer   the same model through ``Trainer``, unwatched, with its history
  nanoGPT   a model and loop in nanoGPT's manner, written here: fused qkv, no options
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.table import publish
from equipoise_lab.data import Windows, embedded
from equipoise_lab.models import GPT, GPTConfig
from equipoise_lab.training.options import TrainOptions
from equipoise_lab.training.trainer import Trainer

CONFIG = GPTConfig(width=128, depth=6, heads=4, context=128)
OPTIONS = TrainOptions(steps=10_000, batch=8, warmup=0, watch=False)
STEPS, ROUNDS = 10, 9


class Reference(nn.Module):
    """Pre-LN blocks with one matrix for q, k and v: the common reference shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        d, self.heads = config.width, config.heads
        self.tokens = nn.Embedding(config.vocabulary, d)
        self.places = nn.Embedding(config.context, d)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln1": nn.LayerNorm(d),
                    "qkv": nn.Linear(d, 3 * d),
                    "out": nn.Linear(d, d),
                    "ln2": nn.LayerNorm(d),
                    "up": nn.Linear(d, 4 * d),
                    "down": nn.Linear(4 * d, d),
                }
            )
            for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(d)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = x + self.attend(block, block["ln1"](x))
            x = x + block["down"](F.gelu(block["up"](block["ln2"](x))))
        return F.linear(self.norm(x), self.tokens.weight)

    def attend(self, block: nn.ModuleDict, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
            for part in block["qkv"](x).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return block["out"](y.transpose(1, 2).reshape(B, T, C))


def windows() -> Windows:
    return Windows(embedded(), context=CONFIG.context, batch=OPTIONS.batch)


def hand_loop(model: nn.Module) -> Callable[[], None]:
    """Return STEPS steps of the usual loop; the loss is read once per call."""
    data = windows()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def run() -> None:
        for _ in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3
            x, y = data.take()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        assert math.isfinite(loss.item())

    return run


def trainer_loop() -> Callable[[], None]:
    trainer = Trainer(GPT(CONFIG), windows(), OPTIONS)

    def run() -> None:
        trainer.options = replace(OPTIONS, steps=trainer.step + STEPS)
        trainer.run()

    return run


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    contestants = {
        "bare": hand_loop(GPT(CONFIG)),
        "trainer": trainer_loop(),
        "nanoGPT": hand_loop(Reference(CONFIG)),
    }
    spent: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS + 1):
        for name, run in contestants.items():
            start = time.process_time()
            run()
            spent[name].append(time.process_time() - start)
    tokens = STEPS * OPTIONS.batch * CONFIG.context
    # The first round warms up. Ratios are of neighbours in time: load moves both.
    ratios = {
        name: [spent["trainer"][i] / spent[name][i] for i in range(1, ROUNDS + 1)]
        for name in contestants
    }
    publish(
        "trainer",
        [
            {
                "loop": name,
                "tokens per CPU second": tokens / statistics.median(seconds[1:]),
                "trainer's time ÷ this one's, median": statistics.median(ratios[name]),
                "worst": max(ratios[name]),
            }
            for name, seconds in spent.items()
        ],
        command="flock bench.lock python -m lab.benchmarks.trainer",
        bars={"bare": 1.05, "nanoGPT": 1.10},
    )


if __name__ == "__main__":
    main()
