"""Small things that cases share: text that can be learnt, and a plain decoder.

Axes, in this file:  B batch · T token · C channel · H head · D head channel ·
V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, ROWS = 32, 24, 8
IGNORED = -100


def source(vocabulary: int = VOCABULARY, *, seed: int = 1234) -> Tensor:
    """Return a Markov chain's transition probabilities: about 1.2 nats a token."""
    rng = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(vocabulary, vocabulary, generator=rng)).softmax(-1)


def text(
    rows: int = ROWS, length: int = LENGTH, *, seed: int, vocabulary: int = VOCABULARY
) -> Tensor:
    """Return (rows, length) ids of the chain; another seed is another stretch of it."""
    p_VV, rng = source(vocabulary), torch.Generator().manual_seed(seed)
    ids = [torch.randint(vocabulary, (rows,), generator=rng)]
    for _ in range(length - 1):
        ids.append(torch.multinomial(p_VV[ids[-1]], 1, generator=rng)[:, 0])
    return torch.stack(ids, 1)


def batches(
    count: int, rows: int = ROWS, length: int = LENGTH, *, seed: int = 0
) -> Iterator[Tensor]:
    """Yield so many different batches of text."""
    for step in range(count):
        yield text(rows, length, seed=1000 * seed + step)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.num_heads, self.causal = heads, causal
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = self.num_heads
        q, k, v = (
            one(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        causal = self.causal and mask is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        joined: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return joined


class Block(nn.Module):
    def __init__(
        self, width: int, heads: int, *, causal: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        widened: Tensor = self.dropout(self.mlp(self.norm2(x)))
        return x + widened


class Decoder(nn.Module):
    """A language model as one would write it: ids (B, T) to logits (B, T, V)."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        *,
        width: int = 32,
        depth: int = 2,
        heads: int = 4,
        length: int = 64,
        causal: bool = True,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, causal=causal, dropout=dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(place)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
