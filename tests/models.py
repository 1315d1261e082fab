"""One small GPT and one small ViT, for tests and benchmarks of the instrument.

The variations are those that a reading must tell apart: where the norm is placed, which
norm it is, shared, grouped and rotated keys, capped scores, linear attention, experts.

Axes, in this file:  B batch · T token · C channel · H query head · G key-value head ·
D head channel · F pair of channels · Q query · K key · N token of any batch ·
E expert · k chosen expert.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    width: int = 64
    depth: int = 4
    heads: int = 4
    kv_heads: int | None = None
    head_width: int | None = None
    ffn_width: int | None = None
    residual: Literal["pre", "post", "deepnorm", "sandwich"] = "pre"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    attention: Literal["standard", "shared", "linear"] = "standard"
    qk_norm: bool = False
    softcap: float | None = None
    temperature: float = 1.0
    activation: Literal["gelu", "relu", "swiglu"] = "gelu"
    experts: int = 0
    experts_per_token: int = 2
    positions: Literal["learned", "rope"] = "learned"
    dropout: float = 0.0
    init_std: float | None = None
    gain: float = 1.0
    """Multiplies the initial weights of Q, K, V and O."""

    @property
    def per_head(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def hidden(self) -> int:
        return self.ffn_width or 4 * self.width

    @property
    def std(self) -> float:
        return self.init_std or 0.02 * math.sqrt(1280 / self.width)


@dataclass(frozen=True, kw_only=True)
class GPTConfig(BlockConfig):
    vocabulary: int = 256
    context: int = 128
    tied: bool = True


@dataclass(frozen=True, kw_only=True)
class ViTConfig(BlockConfig):
    image: int = 32
    channels: int = 3
    patch: int = 4
    classes: int = 10
    pool: Literal["cls", "mean"] = "cls"


def rotated(x_BHTD: Tensor) -> Tensor:
    T, D = x_BHTD.shape[-2:]
    f_F = torch.arange(D // 2, device=x_BHTD.device, dtype=torch.float32)
    t_T = torch.arange(T, device=x_BHTD.device, dtype=torch.float32)
    a_TF = t_T[:, None] * 10000 ** (-f_F / (D // 2))
    cos_TF, sin_TF = a_TF.cos().to(x_BHTD.dtype), a_TF.sin().to(x_BHTD.dtype)
    a, b = x_BHTD.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos_TF - b * sin_TF, a * sin_TF + b * cos_TF], -1).flatten(
        -2
    )


class SelfAttention(nn.Module):
    """The fused call where it serves; written out with a cap or another normaliser."""

    def __init__(self, config: BlockConfig, *, causal: bool) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.normaliser: Callable[[Tensor], Tensor] | None = None
        self.temperature = config.temperature
        inner, outer = config.heads * config.per_head, config.groups * config.per_head
        self.q_proj = nn.Linear(config.width, inner)
        if config.attention != "shared":
            self.k_proj = nn.Linear(config.width, outer)
        self.v_proj = nn.Linear(config.width, outer)
        self.o_proj = nn.Linear(inner, config.width)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.per_head, eps=1e-5)
            self.k_norm = nn.RMSNorm(config.per_head, eps=1e-5)
        self.dropout = nn.Dropout(config.dropout)

    @property
    def scale(self) -> float:
        return 1 / (math.sqrt(self.config.per_head) * self.temperature)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BGTD, v_BGTD = self.projected(x_BTC)
        if self.config.attention == "linear":
            y_BHTD = self.linear(q_BHTD, k_BGTD, v_BGTD)
        elif self.config.softcap or self.normaliser:
            y_BHTD = self.eager(q_BHTD, k_BGTD, v_BGTD)
        else:
            y_BHTD = F.scaled_dot_product_attention(
                q_BHTD,
                k_BGTD,
                v_BGTD,
                dropout_p=self.config.dropout if self.training else 0.0,
                is_causal=self.causal,
                scale=self.scale,
                enable_gqa=self.config.groups < self.config.heads,
            )
        y_BTC: Tensor = self.dropout(self.o_proj(y_BHTD.transpose(1, 2).flatten(2)))
        return y_BTC

    def projected(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BHTD = self._by_head(self.q_proj(x_BTC))
        shared = self.config.attention == "shared"
        k_BGTD = q_BHTD if shared else self._by_head(self.k_proj(x_BTC))
        v_BGTD = self._by_head(self.v_proj(x_BTC))
        if self.config.qk_norm:
            q_BHTD, k_BGTD = self.q_norm(q_BHTD), self.k_norm(k_BGTD)
        if self.config.positions == "rope":
            q_BHTD, k_BGTD = rotated(q_BHTD), rotated(k_BGTD)
        return q_BHTD, k_BGTD, v_BGTD

    def _by_head(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(-1, (-1, self.config.per_head)).transpose(1, 2)

    def eager(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        k_BHTD, v_BHTD = self._repeated(k_BGTD), self._repeated(v_BGTD)
        z_BHQK = torch.einsum("bhqd,bhkd->bhqk", q_BHTD, k_BHTD) * self.scale
        if cap := self.config.softcap:
            z_BHQK = cap * torch.tanh(z_BHQK / cap)
        z_BHQK = self._masked(z_BHQK, -math.inf)
        p_BHQK = self.normaliser(z_BHQK) if self.normaliser else z_BHQK.softmax(-1)
        p_BHQK = F.dropout(p_BHQK, self.config.dropout, self.training)
        return torch.einsum("bhqk,bhkd->bhqd", p_BHQK, v_BHTD)

    def linear(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        k_BHTD, v_BHTD = self._repeated(k_BGTD), self._repeated(v_BGTD)
        root = math.sqrt(self.scale)
        f_BHQD, f_BHKD = F.elu(root * q_BHTD) + 1, F.elu(root * k_BHTD) + 1
        a_BHQK = self._masked(torch.einsum("bhqd,bhkd->bhqk", f_BHQD, f_BHKD), 0.0)
        p_BHQK = a_BHQK / a_BHQK.sum(-1, keepdim=True)
        return torch.einsum("bhqk,bhkd->bhqd", p_BHQK, v_BHTD)

    def _repeated(self, x_BGTD: Tensor) -> Tensor:
        return x_BGTD.repeat_interleave(self.config.heads // self.config.groups, 1)

    def _masked(self, z_BHQK: Tensor, fill: float) -> Tensor:
        if not self.causal:
            return z_BHQK
        hidden_QK = torch.ones_like(z_BHQK[0, 0], dtype=torch.bool).triu(1)
        return z_BHQK.masked_fill(hidden_QK, fill)


class FeedForward(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up_proj = nn.Linear(config.width, config.hidden)
        if config.activation == "swiglu":
            self.gate_proj = nn.Linear(config.width, config.hidden)
        self.down_proj = nn.Linear(config.hidden, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up_proj(x)
        if self.activation == "swiglu":
            h = F.silu(self.gate_proj(x)) * h
        else:
            h = F.gelu(h) if self.activation == "gelu" else F.relu(h)
        y: Tensor = self.dropout(self.down_proj(h))
        return y


class MixtureOfExperts(nn.Module):
    """Each token goes to its k best experts, weighted by the router's softmax."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.chosen = config.experts_per_token
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.experts))

    def forward(self, x: Tensor) -> Tensor:
        x_NC = x.flatten(0, -2)
        p_NE = self.router(x_NC).float().softmax(-1)
        w_Nk, e_Nk = p_NE.topk(self.chosen, dim=-1)
        self.balance_loss = _balance(p_NE, e_Nk)
        w_Nk = (w_Nk / w_Nk.sum(-1, keepdim=True)).to(x.dtype)
        y_NC = torch.zeros_like(x_NC)
        for index, expert in enumerate(self.experts):
            token, choice = (e_Nk == index).nonzero(as_tuple=True)
            # An expert without tokens still runs: its gradient is 0, never missing.
            y = expert(x_NC[token]) * w_Nk[token, choice, None]
            y_NC = y_NC.index_add(0, token, y.to(x.dtype))
        return y_NC.view_as(x)


def _balance(p_NE: Tensor, e_Nk: Tensor) -> Tensor:
    """E·Σₑ (share of tokens of e)·(mean probability of e): 1 where routing is even."""
    experts = p_NE.shape[-1]
    share_E = F.one_hot(e_Nk, experts).float().mean((0, 1))
    return experts * (share_E * p_NE.mean(0)).sum()


def _norm(config: BlockConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.width, eps=1e-5)


class Block(nn.Module):
    """x + f(LN x), LN(x + f x), LN(x + (2N)^(-1/4) f x), or x + LN f(LN x)."""

    def __init__(self, config: BlockConfig, *, causal: bool) -> None:
        super().__init__()
        self.residual, self.depth = config.residual, config.depth
        self.attention_norm = _norm(config)
        self.attention = SelfAttention(config, causal=causal)
        self.feedforward_norm = _norm(config)
        self.feedforward = (MixtureOfExperts if config.experts else FeedForward)(config)
        if config.residual == "sandwich":
            self.attention_norm_after = _norm(config)
            self.feedforward_norm_after = _norm(config)

    def forward(self, x: Tensor) -> Tensor:
        for part in ("attention", "feedforward"):
            f, norm = getattr(self, part), getattr(self, f"{part}_norm")
            match self.residual:
                case "pre":
                    x = x + f(norm(x))
                case "post":
                    x = norm(x + f(x))
                case "deepnorm":
                    x = norm(x + (2 * self.depth) ** -0.25 * f(x))
                case "sandwich":
                    x = x + getattr(self, f"{part}_norm_after")(f(norm(x)))
        return x


def _stack(model: nn.Module, config: BlockConfig, *, causal: bool) -> None:
    model.dropout = nn.Dropout(config.dropout)
    model.blocks = nn.ModuleList(
        Block(config, causal=causal) for _ in range(config.depth)
    )
    ends_normed = config.residual in {"post", "deepnorm"}
    model.final_norm = nn.Identity() if ends_normed else _norm(config)


def _initialise(model: nn.Module, config: BlockConfig) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=config.std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, SelfAttention):
                for linear in module.children():
                    if isinstance(linear, nn.Linear):
                        linear.weight.mul_(config.gain)


class GPT(nn.Module):
    """Tokens to logits; weights come from the global generator: seed before."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.context, config.width)
        _stack(self, config, causal=True)
        if not config.tied:
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        _initialise(self, config)

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
        """Return the stream that the first block reads, before dropout."""
        x_BTC: Tensor = self.token_embedding(tokens_BT)
        if self.config.positions == "learned":
            t_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            x_BTC = x_BTC + self.position_embedding(t_T)
        return x_BTC


class ViT(nn.Module):
    """Square images, cut into patches, to class logits."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        tokens = (config.image // config.patch) ** 2 + (config.pool == "cls")
        pixels = config.channels * config.patch**2
        self.patch_embedding = nn.Linear(pixels, config.width)
        if config.pool == "cls":
            self.cls = nn.Parameter(torch.empty(config.width))
        self.position_TC = nn.Parameter(torch.empty(tokens, config.width))
        _stack(self, config, causal=False)
        self.head = nn.Linear(config.width, config.classes)
        _initialise(self, config)
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, image_BIYX: Tensor) -> Tensor:
        side = self.config.patch
        grid = image_BIYX.unfold(2, side, side).unfold(3, side, side)
        patches_BTP = grid.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
        x_BTC = self.patch_embedding(patches_BTP)
        if self.config.pool == "cls":
            x_BTC = torch.cat([self.cls.expand(len(x_BTC), 1, -1), x_BTC], 1)
        x_BTC = self.dropout(x_BTC + self.position_TC)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        x_BTC = self.final_norm(x_BTC)
        pooled_BC = x_BTC[:, 0] if self.config.pool == "cls" else x_BTC.mean(1)
        logits_BO: Tensor = self.head(pooled_BC)
        return logits_BO
