"""``torch.nn.functional.multi_head_attention_forward``, spelt out.

Axes, in this file: Q query · K key · B batch · C channel · H head · d head width.

torch's own runs as one call in which no stored tensor can be seen. This one makes the
same calls one by one; a walk sees the projections and opens the attention between.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.errors import InputError


def multihead(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return torch's multi-head attention; weights are never returned.

    The parameters are those of the function it stands for, in its order.
    """
    if bias_k is not None or bias_v is not None or add_zero_attn:
        raise InputError("attention with bias_k, bias_v or add_zero_attn is not opened")
    batched = query.dim() == 3
    inputs = [x if batched else x.unsqueeze(1) for x in (query, key, value)]
    weights = _weights(in_proj_weight, options)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        _by_head(F.linear(x, w, b), heads)
        for x, w, b in zip(inputs, weights, biases, strict=True)
    )
    y_BHQd = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=_mask(options, q, k),
        dropout_p=dropout_p if options.get("training", True) else 0.0,
    )
    y_QBC = y_BHQd.permute(2, 0, 1, 3).flatten(2)
    out = F.linear(y_QBC, out_proj_weight, out_proj_bias)
    return (out if batched else out.squeeze(1)), None


def _weights(together: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, ...]:
    if together is not None and not options.get("use_separate_proj_weight"):
        return together.chunk(3)
    return tuple(options[f"{name}_proj_weight"] for name in "qkv")


def _by_head(x_NBC: Tensor, heads: int) -> Tensor:
    x_NBHd: Tensor = x_NBC.unflatten(-1, (heads, -1))
    return x_NBHd.permute(1, 2, 0, 3)


def _mask(options: dict[str, Any], q: Tensor, k: Tensor) -> Tensor | None:
    """Return one additive mask over (B, H, Q, K) from the two torch knows."""
    masks = [_additive(options.get("attn_mask"), q), None]
    if masks[0] is not None and masks[0].dim() == 3:
        masks[0] = masks[0].unflatten(0, (q.shape[0], -1))
    padding = _additive(options.get("key_padding_mask"), q)
    if padding is not None:
        masks[1] = padding.reshape(-1, 1, 1, k.shape[-2])
    given = [mask for mask in masks if mask is not None]
    return None if not given else given[0] if len(given) == 1 else given[0] + given[1]


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
