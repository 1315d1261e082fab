"""``scaled_dot_product_attention``, with whatever axes and defaults it was called.

Axes, in this file:  B batch · H head · G key-value head · Q query · K key · D width.
"""

from torch import Tensor

from equipoise.anatomy.callers import Caller
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.shapes import HEAD_COUNTS, count, four


def sdpa_call(
    caller: Caller,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """Return the call; the parameters are torch's own, in its order."""
    heads = count(caller.module, HEAD_COUNTS)
    q_BHQD = four(query, heads)
    k_BGKD, v_BGKD = (_like(x, query, four(x, heads)) for x in (key, value))
    return AttentionCall(
        module=caller.module,
        kind="sdpa",
        q_BHQD=q_BHQD,
        k_BGKD=k_BGKD,
        v_BGKD=v_BGKD,
        mask=_mask(attn_mask, query, heads),
        causal=is_causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        cross=caller.cross,
    )


def _like(x: Tensor, query: Tensor, x_BGKD: Tensor) -> Tensor:
    """Return keys with the queries' batch: a batch of one serves all."""
    return (
        x_BGKD.expand(four(query, None).shape[0], -1, -1, -1) if x.ndim == 4 else x_BGKD
    )


def _mask(mask: Tensor | None, query: Tensor, heads: int | None) -> Tensor | None:
    """Return the mask with the axes that the queries were given."""
    if mask is None or mask.ndim <= 2 or query.ndim == 4:
        return mask
    return four(mask.expand(*query.shape[:-2], -1, -1), heads)
