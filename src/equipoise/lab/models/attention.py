"""Self-attention: many heads or grouped, shared or separate Q and K, linear.

Positions are sinusoids to add, or rotations of queries and keys.

Axes, in this file:  B batch · T token · C channel · H query head · G key-value head ·
D head channel · F pair of channels · Q query · K key.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.lab.models.config import BlockConfig


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
