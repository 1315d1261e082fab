"""torch.nn's stacks, a nanoGPT-shaped decoder and our lab's models."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import GPT, GPTConfig, ViT, ViTConfig


def _layer(kind: type[nn.Module]) -> Any:
    return kind(32, 4, 64, dropout=0.0, batch_first=True)


def encoder(path: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(_layer(nn.TransformerEncoderLayer), 2)
    return model.train(path == "training")


def transformer(path: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
    return model.train(path == "training")


def _sequence(length: int) -> Tensor:
    return torch.randn(2, length, 32, generator=torch.Generator().manual_seed(length))


def padded() -> dict[str, Any]:
    hidden = torch.zeros(2, 9, dtype=torch.bool)
    hidden[1, -2:] = True
    return {"src": _sequence(9), "src_key_padding_mask": hidden}


def two_sequences() -> dict[str, Any]:
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    return {"src": _sequence(9), "tgt": _sequence(5), "tgt_mask": mask}


def plain() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"tokens_BT": torch.randint(0, 50, (2, 9), generator=generator)}


def picture() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"image_BIYX": torch.randn(2, 3, 8, 8, generator=generator)}


class CausalSelfAttention(nn.Module):
    """One Linear for q, k and v; fused, or written out with a mask of -inf."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head, self.fused = heads, fused

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        parts = self.c_attn(x).split(C, dim=2)
        q, k, v = (p.view(B, T, self.n_head, -1).transpose(1, 2) for p in parts)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, None, 0.0, True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5)
            hidden = torch.ones(T, T).triu(1) == 1
            scores = scores.masked_fill(hidden, float("-inf"))
            y = F.dropout(F.softmax(scores, dim=-1), 0.1, self.training) @ v
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, fused=fused)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class NanoGPT(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, 32), nn.Embedding(16, 32)
        self.h = nn.ModuleList(Block(32, 4, fused=fused) for _ in range(2))
        self.ln_f = nn.LayerNorm(32)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.wte(tokens_BT) + self.wpe(torch.arange(tokens_BT.shape[1]))
        for block in self.h:
            x = block(x)
        out: Tensor = self.ln_f(x)
        return out


def nano_gpt(implementation: str) -> nn.Module:
    torch.manual_seed(0)
    return NanoGPT(fused=implementation == "sdpa").eval()


LAB: dict[str, dict[str, Any]] = {
    "rope": {"positions": "rope"},
    "softcap": {"softcap": 2.0},
    "grouped": {"kv_heads": 2},
    "shared": {"attention": "shared"},
}


def lab_gpt(variant: str) -> nn.Module:
    torch.manual_seed(0)
    config = GPTConfig(width=32, heads=4, depth=2, vocabulary=50, **LAB[variant])
    return GPT(config).eval()


def lab_vit(pool: Any) -> nn.Module:
    torch.manual_seed(0)
    config = ViTConfig(width=32, heads=4, depth=2, image=8, patch=4, pool=pool)
    return ViT(config).eval()
