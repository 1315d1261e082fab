"""Decoders as the speed runs of 2025 and 2026 train them, written by us.

What is unusual for a reader: norms are functions without weights, maps are a subclass
of ``nn.Linear`` that casts, keys and queries are normalised by the same function,
values get an embedding of the token added, windows alternate, logits are capped inside
a model that returns its loss, and two kinds of update share one model.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY = 32, 4, 64


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class CastedLinear(nn.Linear):
    """Weights are stored wide, and used in the format of what they are given."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def rotated(x: Tensor) -> Tensor:
    """Turn pairs of features of (B, T, H, D) by their place."""
    half = x.shape[3] // 2
    rate = 100.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    turn = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] * rate
    first, second = x[..., :half], x[..., half:]
    cos, sin = turn.cos(), turn.sin()
    return torch.cat([first * cos + second * sin, second * cos - first * sin], 3)


def banded(tokens: int, window: int) -> Tensor:
    """Return where a query sees a key: itself and the last ones before it."""
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return (back >= 0) & (back < window)


class NanochatAttention(nn.Module):
    """Separate maps, grouped heads, functional QK-norm, gated value embeddings."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = HEADS, 2, WIDTH // HEADS
        self.window = 4 if layer % 2 == 0 else 64
        self.c_q = CastedLinear(WIDTH, WIDTH)
        self.c_k = CastedLinear(WIDTH, WIDTH // 2)
        self.c_v = CastedLinear(WIDTH, WIDTH // 2)
        self.c_proj = CastedLinear(WIDTH, WIDTH)
        self.ve_gate = CastedLinear(8, 2) if layer % 2 else None

    def forward(self, x: Tensor, value: Tensor | None) -> Tensor:
        B, T, _ = x.shape
        q = self.c_q(x).view(B, T, HEADS, -1)
        k, v = (f(x).view(B, T, 2, -1) for f in (self.c_k, self.c_v))
        if self.ve_gate is not None and value is not None:
            gate = 2 * torch.sigmoid(self.ve_gate(x[..., :8]))
            v = v + gate.unsqueeze(-1) * value.view(B, T, 2, -1)
        q, k = norm(rotated(q)), norm(rotated(k))
        y = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)),
            attn_mask=banded(T, self.window),
            enable_gqa=True,
        )
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(B, T, -1))
        return out


class SquaredReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc = CastedLinear(WIDTH, 4 * WIDTH)
        self.c_proj = CastedLinear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.relu(self.c_fc(x)).square())
        return out


class NanochatBlock(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.attn, self.mlp = NanochatAttention(layer), SquaredReLU()

    def forward(self, x: Tensor, value: Tensor | None) -> Tensor:
        x = x + self.attn(norm(x), value)
        out: Tensor = x + self.mlp(norm(x))
        return out


class NanochatLike(nn.Module):
    """Learned shares of the first stream, value embeddings, a cap, the loss inside."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(NanochatBlock(i) for i in range(depth))
        values = {str(i): nn.Embedding(VOCABULARY, WIDTH // 2) for i in range(depth)}
        self.value_embeds = nn.ModuleDict(
            {i: e for i, e in values.items() if int(i) % 2}
        )
        self.resid_lambdas = nn.Parameter(torch.ones(depth))
        self.x0_lambdas = nn.Parameter(torch.full((depth,), 0.1))
        self.lm_head = CastedLinear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = first = norm(self.wte(input_ids))
        for i, block in enumerate(self.h):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * first
            embed = self.value_embeds[str(i)] if str(i) in self.value_embeds else None
            x = block(x, None if embed is None else embed(input_ids))
        logits = 15 * torch.tanh(self.lm_head(norm(x)) / 15)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class MergedAttention(nn.Module):
    """One matrix for q, k, v and the output, a scale of its own, values mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkvo_w = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / WIDTH**0.5)
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))

    def forward(self, x: Tensor, value: Tensor | None, window: int) -> Tensor:
        B, T, _ = x.shape
        qkv = F.linear(x, self.qkvo_w[: 3 * WIDTH].to(x.dtype))
        q, k, v = qkv.view(B, T, 3 * HEADS, -1).chunk(3, dim=-2)
        q, k = rotated(norm(q)), rotated(norm(k))
        v = self.lambdas[0] * v
        v = v if value is None else v + self.lambdas[1] * value.view_as(v)
        y = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)),
            attn_mask=banded(T, window),
            scale=0.12,
        )
        y = y.transpose(1, 2).reshape(B, T, -1)
        return F.linear(y, self.qkvo_w[3 * WIDTH :].to(y.dtype))


class SpeedrunBlock(nn.Module):
    """Some layers have no attention at all."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.attn = MergedAttention() if attends else None
        self.mlp = SquaredReLU()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(
        self, x: Tensor, value: Tensor | None, first: Tensor, window: int
    ) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * first
        if self.attn is not None:
            x = x + self.attn(norm(x), value, window)
        out: Tensor = x + self.mlp(norm(x))
        return out


class SpeedrunLike(nn.Module):
    """modded-nanogpt's shape: halves joined by skips, smeared tokens, capped logits."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.value_embeds = nn.ModuleList(
            nn.Embedding(VOCABULARY, WIDTH) for _ in range(2)
        )
        self.blocks = nn.ModuleList(SpeedrunBlock(attends=i != 1) for i in range(depth))
        self.skips = nn.Parameter(torch.ones(depth // 2))
        self.smear_gate = CastedLinear(8, 1)
        self.lm_head = CastedLinear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        gate = torch.sigmoid(self.smear_gate(x[:, 1:, :8]))
        x = first = norm(torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], dim=1))
        values = [embed(input_ids) for embed in self.value_embeds]
        kept: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            half = len(self.blocks) // 2
            if i >= half:
                x = x + self.skips[i - half] * kept.pop()
            value = values[i % 2] if i in (0, len(self.blocks) - 1) else None
            x = block(x, value, first, 4 if i % 2 == 0 else 64)
            if i < half:
                kept.append(x)
        logits = 30 * torch.sigmoid(self.lm_head(norm(x)) / 7.5)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def groups(model: nn.Module) -> dict[str, list[Any]]:
    """Return the matrices of the blocks, for Muon, and the rest, for AdamW."""
    blocks = model.h if isinstance(model, NanochatLike) else model.blocks
    matrices = [p for p in blocks.parameters() if p.ndim == 2]  # type: ignore[union-attr]
    theirs = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in theirs]
    return {"muon": matrices, "adamw": rest}
