"""One transformer block: self-attention, residual forms, feed-forward, experts.

Attention has many heads or grouped ones, shared or separate Q and K, or is linear.
Positions are sinusoids to add, or rotations of queries and keys.

Axes, in this file:  B batch · T token · C channel · H query head · G key-value head ·
D head channel · F pair of channels · Q query · K key · N token of any batch ·
E expert · k chosen expert.
"""

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise_lab.models.config import BlockConfig, path_gain


def angles(T: int, pairs: int, device: torch.device | None = None) -> Tensor:
    """Return t·10000^(-f/pairs): the phase of pair f at token t, in float32."""
    t_T = torch.arange(T, device=device, dtype=torch.float32)
    f_F = torch.arange(pairs, device=device, dtype=torch.float32)
    return t_T[:, None] * 10000 ** (-f_F / pairs)


def sinusoidal(T: int, width: int) -> Float[Tensor, "T C"]:
    """Return sines in even channels and cosines in odd ones.

    >>> sinusoidal(1, 4)
    tensor([[0., 1., 0., 1.]])
    """
    a_TF = angles(T, (width + 1) // 2)
    return torch.stack([a_TF.sin(), a_TF.cos()], -1).flatten(1)[:, :width]


def add_sinusoidal(model: nn.Module, T: int, width: int) -> None:
    """Give a model the table ``position_TC``, which no checkpoint holds."""
    model.register_buffer("position_TC", sinusoidal(T, width), persistent=False)


def rotated(x_BHTD: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T D"]:
    """Return x with each pair of channels turned by its phase; norms stay."""
    T, D = x_BHTD.shape[-2:]
    a_TF = angles(T, D // 2, x_BHTD.device)
    cos_TF, sin_TF = a_TF.cos().to(x_BHTD.dtype), a_TF.sin().to(x_BHTD.dtype)
    a, b = x_BHTD.reshape(*x_BHTD.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([a * cos_TF - b * sin_TF, a * sin_TF + b * cos_TF], -1)
    return turned.flatten(-2)


# Scores (scaled, capped, masked with -inf) in, attention rows out.
Normaliser = Callable[[Tensor], Tensor]


class SelfAttention(nn.Module):
    """Attention with a temperature that may be set while training.

    The default path is the fused ``scaled_dot_product_attention``; a soft-cap or a
    normaliser needs the scores themselves and takes the eager one.
    """

    def __init__(self, config: BlockConfig, *, causal: bool) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.normaliser: Normaliser | None = None
        self.temperature = config.temperature
        inner, outer = config.heads * config.per_head, config.groups * config.per_head
        self.q_proj = nn.Linear(config.width, inner, bias=config.qkv_bias)
        if config.attention != "shared":
            self.k_proj = nn.Linear(config.width, outer, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.width, outer, bias=config.qkv_bias)
        self.o_proj = nn.Linear(inner, config.width, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.per_head, eps=config.epsilon)
            self.k_norm = nn.RMSNorm(config.per_head, eps=config.epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BGTD, v_BGTD = self.projected(x_BTC)
        if self.config.attention == "linear":
            y_BHTD = self.linear(q_BHTD, k_BGTD, v_BGTD)
        elif self.config.softcap or self.normaliser:
            y_BHTD = self.eager(q_BHTD, k_BGTD, v_BGTD)
        else:
            y_BHTD = self.fused(q_BHTD, k_BGTD, v_BGTD)
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
        B, T, _ = x_BTC.shape
        return x_BTC.view(B, T, -1, self.config.per_head).transpose(1, 2)

    @property
    def scale(self) -> float:
        return 1 / (math.sqrt(self.config.per_head) * self.temperature)

    def fused(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q_BHTD,
            k_BGTD,
            v_BGTD,
            dropout_p=self.config.dropout if self.training else 0.0,
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=self.config.groups < self.config.heads,
        )

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
        """Return rows of φ(q)·φ(k), normalised; dense, since our T is small."""
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
        T = z_BHQK.shape[-1]
        hidden_QK = torch.ones(T, T, dtype=torch.bool, device=z_BHQK.device).triu(1)
        return z_BHQK.masked_fill(hidden_QK, fill)


class FeedForward(nn.Module):
    """down(act(up x)), or down(silu(gate x) · up x) for SwiGLU."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up_proj = nn.Linear(config.width, config.hidden, bias=config.ffn_bias)
        if config.activation == "swiglu":
            self.gate_proj = nn.Linear(
                config.width, config.hidden, bias=config.ffn_bias
            )
        self.down_proj = nn.Linear(config.hidden, config.width, bias=config.ffn_bias)
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
    """Each token goes to its k best experts, weighted by the router's softmax.

    ``balance_loss`` of the last forward is E·Σₑ (share of tokens)·(mean probability):
    1 when tokens spread evenly, E when all go to one expert.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.chosen = config.experts_per_token
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.experts))
        self.balance_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x_NC = x.flatten(0, -2)
        p_NE = self.router(x_NC).float().softmax(-1)
        w_Nk, e_Nk = p_NE.topk(self.chosen, dim=-1)
        w_Nk = (w_Nk / w_Nk.sum(-1, keepdim=True)).to(x.dtype)
        self.balance_loss = _balance(p_NE, e_Nk)
        y_NC = torch.zeros_like(x_NC)
        for index, expert in enumerate(self.experts):
            token, choice = (e_Nk == index).nonzero(as_tuple=True)
            # An expert without tokens still runs: its gradient is 0, never missing.
            y = expert(x_NC[token]) * w_Nk[token, choice, None]
            y_NC = y_NC.index_add(0, token, y.to(x.dtype))
        return y_NC.view_as(x)


def _balance(p_NE: Tensor, e_Nk: Tensor) -> Tensor:
    E = p_NE.shape[-1]
    share_E = torch.bincount(e_Nk.flatten(), minlength=E) / e_Nk.numel()
    return E * (share_E * p_NE.mean(0)).sum()


Map = Callable[[Tensor], Tensor]


def norm(config: BlockConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.width, eps=config.epsilon)


class Block(nn.Module):
    """Attention and feed-forward, joined in one of five residual forms.

    pre          x + f(LN x)
    post         LN(x + f x)
    deepnorm     LN(x + α f x), α = (2N)^(-1/4), as Emadi writes it
    deepnorm-original   LN(a x + f x), a = (2N)^(1/4), as Wang et al. write it
    sandwich     x + LN f(LN x)
    """

    def __init__(self, config: BlockConfig, *, causal: bool) -> None:
        super().__init__()
        self.residual, self.depth = config.residual, config.depth
        self.attention_norm = norm(config)
        self.attention = SelfAttention(config, causal=causal)
        self.feedforward_norm = norm(config)
        routed = config.experts > 0
        self.feedforward = (MixtureOfExperts if routed else FeedForward)(config)
        if config.residual == "sandwich":
            self.attention_norm_after = norm(config)
            self.feedforward_norm_after = norm(config)

    def forward(self, x: Tensor) -> Tensor:
        for part in ("attention", "feedforward"):
            x = self.joined(x, part)
        return x

    def joined(self, x: Tensor, part: str) -> Tensor:
        f: Map = getattr(self, part)
        normed: Map = getattr(self, f"{part}_norm")
        match self.residual:
            case "pre":
                return x + f(normed(x))
            case "post":
                return normed(x + f(x))
            case "deepnorm":
                return normed(x + (2 * self.depth) ** -0.25 * f(x))
            case "deepnorm-original":
                return normed((2 * self.depth) ** 0.25 * x + f(x))
            case _:
                after: Map = getattr(self, f"{part}_norm_after")
                return x + after(f(normed(x)))


def blocks(config: BlockConfig, *, causal: bool) -> nn.ModuleList:
    """Return the stack of a model."""
    return nn.ModuleList(Block(config, causal=causal) for _ in range(config.depth))


def final_norm(config: BlockConfig) -> nn.Module:
    """Return the norm after the stack; a post-normed stream arrives normalised."""
    return norm(config) if config.residual in {"pre", "sandwich"} else nn.Identity()


def initialise(model: nn.Module, config: BlockConfig) -> None:
    """Draw every Linear from N(0, std²), embeddings from their own, biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=config.std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=config.embedding_std or config.std)
    with torch.no_grad():
        for linear, gain in scaled(model, config):
            linear.weight.mul_(gain)


def scaled(model: nn.Module, config: BlockConfig) -> Iterator[tuple[nn.Linear, float]]:
    """Yield each matrix whose initial size the config changes, and by how much."""
    for module in model.modules():
        if isinstance(module, SelfAttention | FeedForward):
            for name, linear in module.named_children():
                if isinstance(linear, nn.Linear):
                    gain = _gain(name, config)
                    if isinstance(module, SelfAttention):
                        gain *= config.gain
                    yield linear, gain


_DEEPNORM = {"v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"}


def _gain(name: str, config: BlockConfig) -> float:
    match config.gains:
        case "path" if name in {"q_proj", "k_proj", "v_proj", "o_proj"}:
            return path_gain(config)
        case "deepnorm" if name in _DEEPNORM:
            return float((8 * config.depth) ** -0.25)
        case "gpt2" if name in {"o_proj", "down_proj"}:
            return float((2 * config.depth) ** -0.5)
        case _:
            return 1.0
