"""Small models whose masks, losses and positions a test chooses, and their training.

Axes, in this file:  B sequence · T token · C channel · V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise
from equipoise.judging.checks import CHECKS
from equipoise.records import Finding

VOCABULARY, LENGTH, ROWS, WIDTH = 29, 12, 6, 16
IGNORED = -100
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention from q, k, v and a mask."""


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Attention(nn.Module):
    def __init__(self, attend: Attend = fused) -> None:
        super().__init__()
        self.num_heads, self.attend = 2, attend
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, other: Tensor | None = None
    ) -> Tensor:
        y = x if other is None else other
        pairs = ((self.q_proj, x), (self.k_proj, y), (self.v_proj, y))
        q, k, v = (f(z).unflatten(-1, (2, -1)).transpose(1, 2) for f, z in pairs)
        out: Tensor = self.o_proj(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, attend: Attend = fused, *, crossed: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(attend)
        self.other_attention = Attention() if crossed else None
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, other: Tensor | None = None
    ) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        if self.other_attention is not None:
            x = x + self.other_attention(x, None, other)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def causal(length: int = LENGTH) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


class Model(nn.Module):
    """Ids (B, T) to logits (B, T, V), under the mask that is given or made of ids."""

    def __init__(
        self,
        mask: Tensor | Callable[[Tensor], Tensor] | None = None,
        *,
        attend: Attend = fused,
        depth: int = 2,
        padding: int | None = None,
    ) -> None:
        super().__init__()
        self.mask = mask
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.positions = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def embedded(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        out: Tensor = self.tokens(ids) + self.positions(places)
        return out

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedded(ids)
        mask = self.mask(ids) if callable(self.mask) else self.mask
        for block in self.blocks:
            x = block(x, mask)
        out: Tensor = self.head(self.norm(x))
        return out


def text(step: int, *, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Return ids from 2 on: 0 and 1 are left for padding and masks."""
    rng = torch.Generator().manual_seed(step)
    return torch.randint(2, VOCABULARY, (rows, length), generator=rng)


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    z = model(ids)[:, :-1]
    return F.cross_entropy(z.flatten(0, 1), ids[:, 1:].flatten())


Loss = Callable[[Any, Tensor], Tensor]
AREAS = ("forward", "experts", "influence")
OWN = {
    code
    for code, check in CHECKS.items()
    if check.find.__module__.rpartition(".")[2] in AREAS
}
"""The checks of the forward pass: these trainings may break other relations."""


def found(
    model: nn.Module,
    tmp_path: Path,
    loss: Loss = next_token,
    *,
    batch: Callable[[int], Tensor] = text,
    steps: int = 2,
    **options: Any,
) -> dict[str, Finding]:
    """Train a few steps under watch; return code → finding, of checks that stand."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = {"run": tmp_path / "run.eqp", "every": 1, "quiet": True, "strict": True}
    standing: dict[str, Finding] = {}
    with equipoise.watch(model, optimizer, **{**given, **options}) as handle:
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, batch(step)).backward()
            optimizer.step()
        for finding in handle.findings:
            if "resolved" in finding.params:
                standing.pop(finding.code, None)
            elif finding.code in OWN:
                standing[finding.code] = finding
    return standing
