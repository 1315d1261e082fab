"""The two models of ``equipoise demo``, their text and their training: plain torch.

Axes, in this file:  B sequence · T token · C channel · V byte.
"""

import os
import sys
from functools import cache
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.watching import watch

DEPTH, WIDTH, HEADS, CONTEXT, BATCH = 24, 64, 4, 64, 8
RATE, EVERY = 1e-3, 10
ARMS = {"pre": True, "post": False}
"""Name → whether LayerNorm comes before attention and before the feed-forward net."""


class ByteModel(nn.Module):
    """Torch's encoder layers under a causal mask, from bytes to the next byte."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        # Made one by one: nn.TransformerEncoder copies one layer, weights included.
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH,
                HEADS,
                4 * WIDTH,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=norm_first,
            )
            for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH) if norm_first else nn.Identity()
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        T = tokens_BT.shape[1]
        x_BTC = self.embedding(tokens_BT) + self.position(torch.arange(T))
        hidden_TT = nn.Transformer.generate_square_subsequent_mask(T)
        for layer in self.layers:
            x_BTC = layer(x_BTC, src_mask=hidden_TT, is_causal=True)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV


@cache
def text() -> Tensor:
    """Return the bytes of Python's standard library: every machine has them."""
    ours = sys.stdlib_module_names  # not what a user put beside them
    files = Path(os.__file__).parent.glob("*.py")
    data = b"".join(f.read_bytes() for f in sorted(files) if f.stem in ours)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def train(name: str, run: Path, *, steps: int, console: Console) -> None:
    """Train one model, watched; both see the same batches."""
    torch.manual_seed(0)
    model = ByteModel(norm_first=ARMS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (0.1 * steps))
    )
    data, rng = text(), torch.Generator().manual_seed(0)
    with watch(model, optimizer, run=run, every=EVERY):
        for _ in track(range(steps), f"{name}-LN", console=console, transient=True):
            starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=rng)
            window = torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()])
            inputs, targets = window[:, :-1].long(), window[:, 1:].long()
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warmup.step()
