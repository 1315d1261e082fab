"""One transformer block: residual forms, feed-forward, experts, initial weights.

Axes, in this file:  N token of any batch · C channel · E expert · k chosen expert.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.lab.models.attention import SelfAttention
from equipoise.lab.models.config import BlockConfig, path_gain


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
