"""Whatever axes a model's attention has, as (batch, head, query, key).

Axes, in this file:  B batch · H head · Q query · K key · N rows of a folded batch.
"""

from torch import Tensor, nn

HEAD_COUNTS = (
    *("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead"),
    *("num_attn_heads", "attention_heads", "n_attn_heads", "nheads", "h"),
)


def count(module: nn.Module | None, names: tuple[str, ...]) -> int | None:
    """Return the first of these attributes a module or its config has, if any."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def four(x: Tensor, heads: int | None) -> Tensor:
    """Return x of any rank as (B, H, Q, K), its last two axes kept.

    ``heads`` is how many the calling module has, where it says so: it tells a batch
    folded with the heads, (B·H, Q, K), from a batch of single heads.

    Example:
        >>> import torch
        >>> [tuple(four(torch.zeros(s), 4).shape) for s in ((8, 5, 6), (2, 2, 2, 5, 6))]
        [(2, 4, 5, 6), (2, 4, 5, 6)]
        >>> tuple(four(torch.zeros(8, 5, 6), None).shape)
        (8, 1, 5, 6)
        >>> tuple(four(torch.zeros(2, 4, 3, 5, 6), 4).shape)  # three blocks of queries
        (6, 4, 5, 6)
    """
    if x.ndim == 2:
        return x[None, None]
    if x.ndim == 3:
        folded = heads is not None and heads > 1 and x.shape[0] % heads == 0
        return x.unflatten(0, (-1, heads)) if folded and heads else x.unsqueeze(1)
    if x.ndim == 4:
        return x
    return _grouped(x, heads)


def _grouped(x: Tensor, heads: int | None) -> Tensor:
    """Fold the middle axes into heads, or, if one of them is heads, into batch."""
    grouped = x.shape[1:-2].numel()
    if heads is None or heads == grouped or heads not in (x.shape[-3], x.shape[1]):
        return x.flatten(1, -3)
    heads_last = x if heads == x.shape[-3] else x.movedim(1, -3)
    return heads_last.flatten(0, -4)
