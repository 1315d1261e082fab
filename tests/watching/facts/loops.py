"""Small language models and loops, and the checks that speak of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise

V, B, T, D = 32, 8, 24, 16
IGNORED = -100


class Attention(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = 2, causal
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), Attention(causal=causal)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        out: Tensor = x + self.mlp(x)
        return out


class LM(nn.Module):
    def __init__(self, *, causal: bool = True, classes: int = V) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(64, D)
        self.blocks = nn.ModuleList(Block(causal=causal) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, classes, bias=False)

    def embedded(self, ids: Tensor) -> Tensor:
        out: Tensor = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return out

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedded(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ShiftsInside(LM):
    """As models of pixels do: a first token is put before, and the last left out."""

    def embedded(self, ids: Tensor) -> Tensor:
        x = super().embedded(ids)
        return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def text(step: int, rows: int = B, length: int = T) -> Tensor:
    rng = torch.Generator().manual_seed(step)
    return torch.randint(V, (rows, length), generator=rng)


def next_loss(z: Tensor, ids: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(z[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), **options)


Step = Callable[[nn.Module, Tensor], Tensor]


def found(
    loop: Callable[..., None], model: nn.Module, folder: Path, *, steps: int = 4
) -> dict[str, int]:
    """Return code → first step of the checks that a loop violates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"every": 1, "quiet": True, "strict": True}
    with equipoise.watch(model, optimizer, run=folder / "a.eqp", **options):
        loop(model, optimizer, steps)
    run = equipoise.open_run(folder / "a.eqp")
    checks = [f for f in run.findings if f.code.startswith("check.")]
    return {f.code: f.step for f in reversed(checks) if "resolved" not in f.params}


def plain(step: Step) -> Callable[..., None]:
    """Return the loop that a loss of model and ids is trained in."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for number in range(steps):
            optimizer.zero_grad()
            step(model, text(number)).backward()
            optimizer.step()

    return loop
