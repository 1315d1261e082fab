"""A GPT-style decoder, small enough to read.

Axes, in this file:  B batch · T token · C channel · V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.errors import InputError
from equipoise_lab.models.block import add_sinusoidal, blocks, final_norm, initialise
from equipoise_lab.models.config import BlockConfig
from equipoise_lab.options import preset, require


@dataclass(frozen=True, kw_only=True)
class GPTConfig(BlockConfig):
    """A decoder of bytes by default."""

    vocabulary: int = 256
    context: int = 128
    tied: bool = True
    """The head is the token embedding, as in GPT-2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.vocabulary > 0, "vocabulary must be positive")
        require(self.context > 0, "context must be positive")


class GPT(nn.Module):
    """Tokens to logits.

    Blocks are ``blocks.i.{attention, feedforward}`` with ``q_proj, k_proj, v_proj,
    o_proj`` and ``up_proj, down_proj``; their norms are ``attention_norm`` and
    ``feedforward_norm``. Weights come from the global generator: seed before.

    >>> GPT(GPTConfig(depth=2))(torch.zeros(1, 8, dtype=torch.long)).shape
    torch.Size([1, 8, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.context, config.width)
        elif config.positions == "sinusoidal":
            add_sinusoidal(self, config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = blocks(config, causal=True)
        self.final_norm = final_norm(config)
        if not config.tied:
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        initialise(self, config)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.dropout(self.embedded(tokens_BT))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        x_BTC = self.final_norm(x_BTC)
        if self.config.tied:
            return F.linear(x_BTC, self.token_embedding.weight)
        logits_BTV: Tensor = self.head(x_BTC)
        return logits_BTV

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        T = tokens_BT.shape[1]
        if T > self.config.context:
            raise InputError(f"{T} tokens do not fit context {self.config.context}")
        x_BTC: Tensor = self.token_embedding(tokens_BT)
        match self.config.positions:
            case "learned":
                t_T = torch.arange(T, device=tokens_BT.device)
                x_BTC = x_BTC + self.position_embedding(t_T)
            case "sinusoidal":
                x_BTC = x_BTC + self.get_buffer("position_TC")[:T]
        return x_BTC


GPTS = {
    "demo": GPTConfig(width=64, depth=24, heads=4, context=64),
    "nano": GPTConfig(width=128, depth=6, heads=4, context=128),
    # Emadi §7: 774M parameters with GPT-2's vocabulary.
    "paper-774m": GPTConfig(
        width=1280, depth=36, heads=20, ffn_width=5120, context=1024, vocabulary=50257
    ),
    "llama-tiny": GPTConfig(
        width=128,
        depth=6,
        heads=8,
        kv_heads=2,
        ffn_width=344,
        norm="rmsnorm",
        activation="swiglu",
        positions="rope",
        qkv_bias=False,
        output_bias=False,
        ffn_bias=False,
        tied=False,
    ),
    "moe-tiny": GPTConfig(width=64, depth=6, heads=4, experts=4),
}


def gpt_preset(name: str) -> GPTConfig:
    """Return the named decoder; vary it with ``dataclasses.replace``."""
    return preset(GPTS, name)
