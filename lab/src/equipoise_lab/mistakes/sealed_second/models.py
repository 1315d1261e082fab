"""Models of this half, written as people write them now, and small.

Axes, in this file:  B batch · T token · C channel · H head · D head channel ·
V vocabulary · E expert.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise_lab.mistakes.sealed.parts import IDS, SMALL

Rope = tuple[Tensor, Tensor]


def rms(x: Tensor) -> Tensor:
    """Normalise the channels without a gain, as nanochat does."""
    return F.rms_norm(x, (x.shape[-1],))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of (…, T, D) by angles (T, D / 2); keep the format."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def causal(length: int) -> Tensor:
    """Return (T, T), true where a query sees a key."""
    return torch.ones(length, length, dtype=torch.bool).tril()


class NanoAttention(nn.Module):
    """Rotary, normalised queries and keys, no biases: nanochat's kind."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.c_q, self.c_k, self.c_v, self.c_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for one in (self.c_q, self.c_k, self.c_v)
        )
        q, k = rms(turned(q, *rope)), rms(turned(k, *rope))
        return self.c_proj(self.attend(q, k, v, mask).transpose(1, 2).flatten(-2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )


class SquaredRelu(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.c_fc(x).relu().square())


class NanoBlock(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.attn, self.mlp = NanoAttention(width, heads), SquaredRelu(width)

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(rms(x), rope, mask)
        return x + self.mlp(rms(x))


class Nano(nn.Module):
    """nanochat's kind of decoder: it returns a loss when it is given targets."""

    def __init__(
        self, vocabulary: int = 32, *, width: int = 32, depth: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(NanoBlock(width, heads) for _ in range(depth))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.pairs = width // heads // 2
        self.apply(self._start)

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5)

    def rope(self, length: int) -> Rope:
        angle = torch.outer(torch.arange(length).float(), self.rates())
        return angle.cos(), angle.sin()

    def rates(self) -> Tensor:
        return 10000 ** (-torch.arange(self.pairs).float() / self.pairs)

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x, rope = rms(self.wte(ids)), self.rope(ids.shape[1])
        for block in self.blocks:
            x = block(x, rope, mask)
        return rms(x)

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        logits = 15 * torch.tanh(self.lm_head(self.hidden(ids, mask)) / 15)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nano_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Give inputs and the next tokens, as a loader of nanoGPT's kind would."""
    loss: Tensor = model(ids[:, :-1], ids[:, 1:])
    return loss


class Latent(NanoAttention):
    """Keys and values out of one narrow latent (MLA's kind), without its own rope."""

    def __init__(self, width: int = 32, heads: int = 4, narrow: int = 8) -> None:
        super().__init__(width, heads)
        self.down = nn.Linear(width, narrow, bias=False)
        self.c_k = nn.Sequential(self.down, nn.Linear(narrow, width, bias=False))
        self.c_v = nn.Sequential(self.down, nn.Linear(narrow, width, bias=False))


class Fused(nn.Module):
    """Two-way attention with one projection, masked by an additive bias."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for one in self.qkv(x).chunk(3, -1)
        )
        p = (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1)
        return self.out((p @ v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """A layer normalised after each branch, as BERT's is."""

    def __init__(self, width: int = 32, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.attention = attention or Fused(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        x = self.norm1(x + self.attention(x, bias))
        return self.norm2(x + self.feed(x))


class Encoder(nn.Module):
    """A two-way model of tokens with a head for each."""

    def __init__(self, outputs: int = 32, *, depth: int = 2, placed: bool = True):
        super().__init__()
        self.tokens = nn.Embedding(32, 32)
        self.place = nn.Embedding(64, 32) if placed else None
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(32, outputs)

    def embedded(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.place is not None:
            x = x + self.place(torch.arange(ids.shape[1]))
        return x

    def forward(self, ids: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        x = self.embedded(ids)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x)


class GatedState(nn.Module):
    """Linear attention whose state decays: S ← αS + kᵀv, out = qS."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.decay, self.out = nn.Linear(width, heads), nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """Read a state; where ``keep`` (B, T) is 0 it starts again."""
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)) for one in self.qkv(x).chunk(3, -1)
        )
        alpha = torch.sigmoid(self.decay(x) + 2)
        if keep is not None:
            alpha = alpha * keep[..., None]
        k = F.normalize(k, dim=-1)
        state, out = x.new_zeros(len(x), self.heads, k.shape[-1], k.shape[-1]), []
        for t in range(x.shape[1]):
            state = alpha[:, t, :, None, None] * state
            state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
            out.append((q[:, t, :, None] @ state)[:, :, 0])
        return self.out(rms(torch.stack(out, 1)).flatten(-2))


class Hybrid(Nano):
    """A layer of linear attention below one of softmax attention."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.state = GatedState()

    def hidden(
        self, ids: Tensor, mask: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        x, rope = rms(self.wte(ids)), self.rope(ids.shape[1])
        x = self.blocks[0](x + self.state(x, keep), rope, mask)
        return rms(x)


class Experts(nn.Module):
    """Top-k experts with a softmax router; ``router`` may be replaced."""

    def __init__(self, count: int = 4, top_k: int = 2, width: int = 32) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(SquaredRelu(width) for _ in range(count))
        self.balance = torch.zeros(())

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of the experts of each token, (…, k)."""
        p = self.router(x).softmax(-1)
        self.balance = self.loss(p)
        weight, chosen = p.topk(self.top_k, -1)
        return weight / weight.sum(-1, keepdim=True), chosen

    def loss(self, p: Tensor) -> Tensor:
        """Return E · Σ share · mean probability, as Switch Transformers do."""
        chosen = p.topk(self.top_k, -1).indices
        share = F.one_hot(chosen, p.shape[-1]).float().mean((0, 1))
        return p.shape[-1] * (share * p.mean(0)).sum()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weight, chosen = self.weights(flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            at, slot = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, at, expert(flat[at]) * weight[at, slot, None])
        return out.view_as(x)


def sparse(make: Any = Experts, **options: Any) -> Nano:
    """Return a decoder whose feed-forwards are experts."""
    model = Nano()
    for block in model.blocks:
        block.mlp = make(**options)
    return model


def balanced_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss with a hundredth of each block's balance."""
    return nano_loss(model, ids) + 0.01 * sum(b.mlp.balance for b in model.blocks)


class Patches(nn.Module):
    """A classifier of images, its attention written with einsum."""

    def __init__(self, classes: int = 4, *, attend: Any = None) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(16, 32))
        self.norm, self.last = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.feed = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, classes)
        self.attend = attend or self.over_keys

    @staticmethod
    def over_keys(scores_bqkh: Tensor) -> Tensor:
        return scores_bqkh.softmax(2)

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT + self.place
        q, k, v = (
            one.unflatten(-1, (4, 8)) for one in self.qkv(self.norm(x)).chunk(3, -1)
        )
        p = self.attend(torch.einsum("bqhd,bkhd->bqkh", q, k) / 8**0.5)
        x = x + self.out(torch.einsum("bqkh,bkhd->bqhd", p, v).flatten(-2))
        return x + self.feed(self.last(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(1))


class Seeing(nn.Module):
    """A language model that reads patches of an image before its text."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.projector = Patches(), nn.Linear(32, 32)
        self.language = Nano()

    def seen(self, x: Tensor) -> Tensor:
        return self.vision.features(x)

    def logits(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return (B, patches + T, V)."""
        seen = self.projector(self.seen(x))
        joined = torch.cat((seen, rms(self.language.wte(ids))), 1)
        rope = self.language.rope(joined.shape[1])
        for block in self.language.blocks:
            joined = block(joined, rope)
        return self.language.lm_head(rms(joined))


def qwen3(**changes: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {**SMALL, **IDS, "num_key_value_heads": 2, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**{**sizes, **changes}))


def gemma3(**changes: Any) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {**SMALL, **IDS, "num_key_value_heads": 2, "head_dim": 8}
    config = Gemma3TextConfig(**{**sizes, "sliding_window": 8, **changes})
    return Gemma3ForCausalLM(config)


def neox(**changes: Any) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**{**SMALL, **IDS, **changes}))


def olmo(**changes: Any) -> Any:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM(Olmo2Config(**{**SMALL, **IDS, **changes}))


def qwen3_moe(**changes: Any) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "output_router_logits": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SMALL, **IDS, **sizes, **changes}))
