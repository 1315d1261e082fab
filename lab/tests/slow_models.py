"""Slow, obvious transformers in float64, to judge ``equipoise_lab.models``.

Loops over batch, head and query, written from the equations: nothing is batched, no
fused attention, no nn.Module is called.
"""

import math

import torch
from torch import Tensor, nn


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    y = x @ module.weight.double().T
    return y if module.bias is None else y + module.bias.double()


def attention(
    x_TC: Tensor,
    module: nn.Module,
    *,
    heads: int,
    kv_heads: int,
    tau: float = 1.0,
    cap: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Return one sequence's attention output, one query at a time."""
    x_TC = x_TC.detach()
    q = linear(x_TC, module.q_proj)
    k = linear(x_TC, getattr(module, "k_proj", module.q_proj))
    v = linear(x_TC, module.v_proj)
    D = q.shape[-1] // heads
    out = torch.zeros_like(q)
    for h in range(heads):
        g = h * kv_heads // heads
        kh, vh = k[:, g * D : (g + 1) * D], v[:, g * D : (g + 1) * D]
        for i in range(len(x_TC)):
            seen = i + 1 if causal else len(x_TC)
            qi = q[i, h * D : (h + 1) * D]
            z = [float((qi @ kh[j]).detach()) / math.sqrt(D) / tau for j in range(seen)]
            if cap:
                z = [cap * math.tanh(s / cap) for s in z]
            top = max(z)
            weights = [math.exp(s - top) for s in z]
            row = sum((w * vh[j] for j, w in enumerate(weights)), torch.zeros(D))
            out[i, h * D : (h + 1) * D] = row / sum(weights)
    return linear(out, module.o_proj)


def layernorm(x: Tensor, module: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    scaled = centred / (variance + module.eps).sqrt()
    return scaled * module.weight.double() + module.bias.double()
