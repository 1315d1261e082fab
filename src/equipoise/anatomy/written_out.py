"""``scaled_dot_product_attention`` in plain operations, each open to the caller.

Axes, in this file:  H head · Q query · K key · D head channel.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def _softmax(z_HQK: Tensor) -> Tensor:
    return torch.softmax(z_HQK, -1)


@dataclass(frozen=True)
class WrittenOut:
    """Fused attention as three steps that may be listened to, or replaced.

    ``Mix(dropout(weigh(mask(scores(scale · q, kᵀ)))), v)``: what the fused function
    computes, with its scores in memory. A row that sees no key is left to ``weigh``.

    >>> q = k = v = torch.eye(2)[None]
    >>> attention = WrittenOut(weigh=lambda z: (z > 0).to(z.dtype))
    >>> attention(q, k, v).tolist()
    [[[1.0, 0.0], [0.0, 1.0]]]
    """

    scores: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    weigh: Callable[[Tensor], Tensor] = _softmax
    mix: Callable[[Tensor, Tensor], Tensor] = torch.matmul

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the mixed values; the parameters are torch's own, in its order."""
        if enable_gqa:
            copies = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(copies, -3) for x in (key, value))
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        z_HQK = self.scores(query * scale, key.mT)
        a_HQK = self.weigh(_masked(z_HQK, attn_mask, is_causal=is_causal))
        # Without dropout the call is left out: it would be one more operation seen.
        return self.mix(F.dropout(a_HQK, dropout_p) if dropout_p else a_HQK, value)


def _masked(z_HQK: Tensor, mask: Tensor | None, *, is_causal: bool) -> Tensor:
    if is_causal:
        Q, K = z_HQK.shape[-2:]
        seen = torch.ones(Q, K, dtype=torch.bool, device=z_HQK.device).tril()
        z_HQK = z_HQK.masked_fill(~seen, -math.inf)
    if mask is None:
        return z_HQK
    if mask.dtype == torch.bool:
        return z_HQK.masked_fill(~mask, -math.inf)
    return z_HQK + mask
