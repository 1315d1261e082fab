"""A pair of towers, and a vision transformer with timm's names and axes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64}


def clip(implementation: str) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    text = {**SIZES, "vocab_size": 50, "max_position_embeddings": 16}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    sight = {**SIZES, "image_size": 8, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=sight)
    for part in (config, config.text_config, config.vision_config):
        part._attn_implementation = implementation
    model: nn.Module = CLIPModel(config)
    return model.eval()


class Attention(nn.Module):
    """q, k and v from one map, unbound from axes (3, B, H, T, D), as timm does."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = nn.LayerNorm(width // heads), nn.Identity()
        self.fused_attn = fused

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        else:
            scores = (q * self.scale) @ k.transpose(-2, -1)
            y = scores.softmax(dim=-1) @ v
        out: Tensor = self.proj(y.transpose(1, 2).reshape(B, N, C))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, fused=fused)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionTransformer(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 32))
        self.patch_embed = nn.Linear(48, 32)
        self.blocks = nn.Sequential(*(Block(32, 4, fused=fused) for _ in range(2)))
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        out: Tensor = self.norm(self.blocks(x))
        return out


def timm_shaped(implementation: str) -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(fused=implementation == "sdpa").eval()


def patches() -> dict[str, Any]:
    return {"x": torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(0))}
