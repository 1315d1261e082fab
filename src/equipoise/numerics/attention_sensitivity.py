"""How strongly softmax attention reacts to its scores, from queries and keys.

Axes, in this file:  x, y leading (batch) axes · K key · H query head · G key head
· Q query · D head width · q query of one block.
Rows are formed one block of queries at a time, and dropped again.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.rows.balance import Balance, intervals

# Scores of one block, in entries: 8 MiB in float32, and softmax needs as much again.
_BLOCK = 1 << 21


def sensitivity(
    q: Float[Tensor, "*x Q D"],
    k: Float[Tensor, "*y K D"],
    *,
    scale: float | None = None,
    temperature: float = 1.0,
    mask: Bool[Tensor, "*m K"] | Float[Tensor, "*m K"] | None = None,
    causal: bool = False,
    effort: float = 1.0,
) -> Balance:
    """Return ‖∂ softmax(z/τ) / ∂z‖_{∞→1} = θ(p)/τ of every query, as an interval.

    z = scale · q kᵀ, p = softmax(z/τ). Blocks of queries are formed and dropped again,
    so memory is O(block · K), never Q × K.

    Args:
        q, k: As for ``scaled_dot_product_attention``; k may have fewer heads on
            the third axis from the end (grouped queries), a divisor of q's.
        scale: 1/√D unless given.
        temperature: τ; divides the scores.
        mask: Boolean (True is visible) or added to the scores; broadcasts to
            (…, Q, K).
        causal: Query i sees keys 0 … i, as ``is_causal`` does.
        effort: As for ``balance``.

    Returns:
        ``lower`` and ``upper`` shaped like q without its last axis. A query that sees
        no key has no row, and reads NaN.

    Example:
        >>> q = k = torch.zeros(4, 8)
        >>> sensitivity(q, k, causal=True, temperature=2.0).lower
        tensor([0.0000, 0.5000, 0.4444, 0.5000])
    """
    _check(q, k, temperature)
    dtype = torch.promote_types(q.dtype, torch.float32)
    factor = (q.shape[-1] ** -0.5 if scale is None else scale) / temperature
    k = k.detach().to(dtype)
    size = max(1, _BLOCK // (k.shape[-2] * max(1, q.shape[:-2].numel())))
    found = []
    for start in range(0, q.shape[-2], size):
        stop = min(start + size, q.shape[-2])
        keys = k[..., :stop, :] if causal else k
        z_xqK = _scores(q.detach()[..., start:stop, :].to(dtype) * factor, keys)
        if mask is not None:
            z_xqK = _masked(z_xqK, _slice(mask, q, (start, stop)), temperature)
        if causal:
            z_xqK = z_xqK.masked_fill_(_future(z_xqK, start), -torch.inf)
        found.append(intervals(z_xqK.softmax(-1), witness=False, effort=effort))
    return _joined(found, temperature, q.new_empty(q.shape[:-1], dtype=dtype))


def _check(q: Tensor, k: Tensor, temperature: float) -> None:
    if q.ndim < 2 or k.ndim < 2 or q.shape[-1] != k.shape[-1] or not k.shape[-2]:
        raise InputError(
            f"q and k must be (…, tokens, width) with one width and at least one key; "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    heads, groups = (t.shape[-3] if t.ndim > 2 else 1 for t in (q, k))
    if groups == 0 or heads % groups:
        raise InputError(
            f"{heads} query heads cannot share {groups} key heads: for grouped queries "
            f"the first must be a multiple of the second"
        )
    if not 0 < temperature < float("inf"):
        raise InputError(f"temperature must be positive and finite, not {temperature}")


def _scores(q_xqD: Tensor, k_yKD: Tensor) -> Tensor:
    """Return q kᵀ; query heads that share a key head are stacked, not k repeated."""
    if q_xqD.ndim < 3 or k_yKD.ndim < 3 or q_xqD.shape[-3] == k_yKD.shape[-3]:
        return q_xqD @ k_yKD.mT
    *x, _, q, D = q_xqD.shape
    z_xGqK = q_xqD.reshape(*x, k_yKD.shape[-3], -1, D) @ k_yKD.mT
    return z_xGqK.reshape(*x, -1, q, k_yKD.shape[-2])


def _slice(mask: Tensor, q: Tensor, rows: tuple[int, int]) -> Tensor:
    """Return the mask of one block of queries."""
    mask = mask.detach()
    if mask.ndim > 1 and mask.shape[-2] == q.shape[-2]:
        return mask[..., rows[0] : rows[1], :]
    return mask


def _masked(z_xqK: Tensor, mask: Tensor, temperature: float) -> Tensor:
    mask = mask[..., : z_xqK.shape[-1]]
    if mask.dtype == torch.bool:
        return z_xqK.masked_fill(~mask, -torch.inf)
    return z_xqK + mask / temperature


def _future(z_xqK: Tensor, start: int) -> Tensor:
    """Return where the key is later than the query."""
    query = torch.arange(start, start + z_xqK.shape[-2], device=z_xqK.device)
    return torch.arange(z_xqK.shape[-1], device=z_xqK.device) > query[:, None]


def _joined(found: list[Balance], temperature: float, like_xQ: Tensor) -> Balance:
    if not found:
        return Balance(like_xQ, like_xQ.clone(), like_xQ.bool())
    return Balance(
        torch.cat([part.lower for part in found], -1) / temperature,
        torch.cat([part.upper for part in found], -1) / temperature,
        torch.cat([part.exact for part in found], -1),
    )
