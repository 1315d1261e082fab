"""The scores inside ``F.multi_head_attention_forward``, computed again from its inputs.

Axes, in this file:  B batch · H head · Q query · K key · D head width · E model width.
torch's function takes (Q, B, E) and projects inside, where no mode can see.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.anatomy.callers import Caller
from equipoise.anatomy.calls import AttentionCall

# The order of the function's positional parameters, as documented.
PARAMETERS = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads"),
    *("in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "add_zero_attn"),
    *("dropout_p", "out_proj_weight", "out_proj_bias", "training"),
    *("key_padding_mask", "need_weights", "attn_mask", "use_separate_proj_weight"),
    *("q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v"),
    *("average_attn_weights", "is_causal"),
)
Given = dict[str, Any]


def from_function(
    caller: Caller, args: tuple[Any, ...], kwargs: Given
) -> AttentionCall:
    """Return the call that ``F.multi_head_attention_forward(*args, **kwargs)`` is."""
    given: Given = {**dict(zip(PARAMETERS, args, strict=False)), **kwargs}
    query, key = given["query"], given["key"]
    unbatched = query.dim() == 2
    if unbatched:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
    q_BHQD, k_BHKD = _projected(query, key, given)
    k_BHKD, extra = _extended(k_BHKD, given)
    return AttentionCall(
        module=caller.module,
        kind="mha",
        q_BHQD=q_BHQD,
        k_BGKD=k_BHKD,
        mask=_mask(given, q_BHQD.shape[:2], extra=extra),
        causal=_causal_without_mask(given),
        scale=q_BHQD.shape[-1] ** -0.5,
        cross=given["query"] is not given["key"] and caller.cross,
        extra_keys=extra,
    )


def from_module(caller: Caller, args: tuple[Any, ...], kwargs: Given) -> AttentionCall:
    """Return the call that the caller's own module made, whichever path it took."""
    module = caller.module
    assert isinstance(module, nn.MultiheadAttention)
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given: Given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key = given["query"], given["key"]
    same = query is key
    if query.dim() == 3 and module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    inputs = {"query": query, "key": query if same else key, "is_causal": False}
    return from_function(caller, (), {**weights(module), **given, **inputs})


def weights(module: nn.MultiheadAttention) -> Given:
    """Return what a module passes to the function besides its inputs."""
    return {
        "num_heads": module.num_heads,
        "in_proj_weight": module.in_proj_weight,
        "in_proj_bias": module.in_proj_bias,
        "bias_k": module.bias_k,
        "add_zero_attn": module.add_zero_attn,
        "use_separate_proj_weight": not module._qkv_same_embed_dim,
        "q_proj_weight": module.q_proj_weight,
        "k_proj_weight": module.k_proj_weight,
    }


def _projected(query: Tensor, key: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    """Return q and k by head; only these two of the three maps are computed again."""
    E, H = query.shape[-1], given["num_heads"]
    if given.get("use_separate_proj_weight"):
        q_weight, k_weight = given["q_proj_weight"], given["k_proj_weight"]
    else:
        q_weight, k_weight, _ = given["in_proj_weight"].split(E)
    bias = given.get("in_proj_bias")
    q_bias, k_bias, _ = (None, None, None) if bias is None else bias.split(E)
    q_BHQD = _by_head(_linear(query, q_weight, q_bias), H)
    static: Tensor | None = given.get("static_k")
    if static is not None:
        return q_BHQD, static.unflatten(0, (-1, H))
    return q_BHQD, _by_head(_linear(key, k_weight, k_bias), H)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Under autocast the input may be narrower than the weight."""
    return F.linear(x.detach().to(weight.dtype), weight, bias)


def _by_head(x_TBE: Tensor, heads: int) -> Tensor:
    x_TBHD: Tensor = x_TBE.unflatten(-1, (heads, -1))
    return x_TBHD.permute(1, 2, 0, 3)


def _extended(k_BHKD: Tensor, given: Given) -> tuple[Tensor, int]:
    """Return the keys with ``bias_k`` and the zero key appended, and how many."""
    columns = []
    if (bias := given.get("bias_k")) is not None:
        one_1H1D = _by_head(bias, k_BHKD.shape[1])
        columns.append(one_1H1D.expand(k_BHKD.shape[0], -1, -1, -1))
    if given.get("add_zero_attn"):
        columns.append(torch.zeros_like(k_BHKD[:, :, :1]))
    return torch.cat([k_BHKD, *columns], 2) if columns else k_BHKD, len(columns)


def _causal_without_mask(given: Given) -> bool:
    """torch drops the mask for the hint only where nothing else needs the mask."""
    hint: bool = given.get("is_causal", False) and given.get("attn_mask") is not None
    needs = given.get("key_padding_mask") is not None or given.get("need_weights", True)
    return hint and not needs


def _mask(given: Given, BH: tuple[int, ...], *, extra: int) -> Tensor | None:
    """Return both masks as one additive mask, or None; extra columns are visible."""
    parts = []
    attention, padding = given.get("attn_mask"), given.get("key_padding_mask")
    if attention is not None and not _causal_without_mask(given):
        # (Q, K), or (B·H, Q, K)
        additive = _additive(attention)
        parts.append(
            additive.unflatten(0, tuple(BH)) if additive.ndim == 3 else additive
        )
    if padding is not None:
        padding = padding[None] if padding.ndim == 1 else padding
        parts.append(_additive(padding)[:, None, None])
    if not parts:
        return None
    mask = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return F.pad(mask, (0, extra)) if extra else mask


def _additive(mask: Tensor) -> Tensor:
    """torch's own convention here: True hides."""
    if mask.dtype != torch.bool:
        return mask.detach()
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, float("-inf"))
