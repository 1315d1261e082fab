"""Feed-forward networks: plain, gated, or a routed mixture of experts.

Axes, in this file:  N token of any batch · C channel · E expert · k chosen expert.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.lab.models.config import BlockConfig


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
