"""Second derivatives by differentiating an obvious forward pass twice, in float64.

Norms are composed by hand: ``torch.func.hessian`` of ``F.layer_norm`` is wrong.
Nothing here knows a formula of ``equipoise.theory.curvature``.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.oracles.lipschitz import _rotated as rotated_by_complex_numbers

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "identity": lambda z: z,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def whole_hessian(function: Callable[..., Tensor], at: Sequence[Tensor]) -> Tensor:
    """Return the dense Hessian over all arguments, flat and in order."""
    sizes = [x.numel() for x in at]
    flat = torch.cat([x.detach().double().flatten() for x in at]).requires_grad_()
    parts = [
        part.reshape(x.shape) for part, x in zip(flat.split(sizes), at, strict=True)
    ]
    slope = torch.autograd.grad(function(*parts), flat, create_graph=True)[0]
    if not slope.requires_grad:
        return torch.zeros(len(flat), len(flat), dtype=flat.dtype)
    eye = torch.eye(len(flat), dtype=flat.dtype)
    return torch.autograd.grad(
        slope, flat, eye, is_grads_batched=True, materialize_grads=True
    )[0].detach()


def norm(x: Tensor, gain: Tensor, *, eps: float, centred: bool) -> Tensor:
    """Return LayerNorm or RMSNorm made of plain operations."""
    m = x - x.mean(-1, keepdim=True) if centred else x
    return gain * m / ((m * m).mean(-1, keepdim=True) + eps).sqrt()


def attention(
    weights: Sequence[Tensor], x: Tensor, seen: Tensor, rotary: object = None
) -> Tensor:
    """Return multi-head attention one query head at a time; seen[q, k] is a boolean."""
    w_q, w_k, w_v, w_o = weights
    total = torch.zeros_like(x)
    for h in range(len(w_q)):
        g = h * len(w_k) // len(w_q)
        q = rotated_by_complex_numbers(x @ w_q[h], rotary)  # type: ignore[arg-type]
        k = rotated_by_complex_numbers(x @ w_k[g], rotary)  # type: ignore[arg-type]
        scores = (q @ k.T / math.sqrt(w_q.shape[-1])).masked_fill(~seen, -math.inf)
        total = total + scores.softmax(-1) @ (x @ w_v[g]) @ w_o[h]
    return total


def feedforward(
    x: Tensor, w_in: Tensor, w_out: Tensor, w_up: Tensor | None, activation: str
) -> Tensor:
    hidden = ACTIVATIONS[activation](x @ w_in)
    return (hidden if w_up is None else hidden * (x @ w_up)) @ w_out


def relative(found: Tensor, truth: Tensor) -> float:
    """Return the largest error over the largest entry of the truth."""
    size = float(truth.abs().max())
    return float((found - truth).abs().max()) / (size if size > 0 else 1.0)
