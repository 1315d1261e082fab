"""Scores of a layer's heads, some queries at a time.

Axes, in this file:  B batch · H head · G key-value head · Q query · K key · D width ·
q queries of one block · k keys they see.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from equipoise.errors import InputError

# Scores held at once: 4 MiB of float32.
SCORES = 1 << 20


def score_blocks(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (queries, scores_BHqk), hidden keys at -inf, at least float32.

    Under a causal mask the keys stop where the block's last query does.
    """
    _check(q_BHQD, k_BGKD, causal)
    q_BHQD, k_BGKD = _wide(q_BHQD) * scale, _wide(k_BGKD)
    (B, H, Q, D), (_, G, K, _) = q_BHQD.shape, k_BGKD.shape
    past = K - Q
    for start in range(0, Q, max(1, SCORES // (B * H * K))):
        stop = min(start + max(1, SCORES // (B * H * K)), Q)
        k = stop + past if causal else K
        q_BGrD = q_BHQD[:, :, start:stop].reshape(B, G, -1, D)
        z_BHqk = (q_BGrD @ k_BGKD[:, :, :k].mT).view(B, H, stop - start, k)
        if mask is not None:
            z_BHqk = _masked(z_BHqk, mask.expand(B, H, Q, K)[:, :, start:stop, :k])
        if causal:
            i, j = torch.arange(start, stop), torch.arange(k)
            after = (j > i[:, None] + past).to(z_BHqk.device)
            z_BHqk = z_BHqk.masked_fill(after, -torch.inf)
        yield slice(start, stop), z_BHqk


def _masked(z_BHqk: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return z_BHqk.masked_fill(~mask, -torch.inf)
    return z_BHqk + mask.to(z_BHqk.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _check(q_BHQD: Tensor, k_BGKD: Tensor, causal: bool) -> None:
    shapes = f"{tuple(q_BHQD.shape)} and {tuple(k_BGKD.shape)}"
    if q_BHQD.ndim != 4 or k_BGKD.ndim != 4 or q_BHQD.shape[1] % k_BGKD.shape[1]:
        raise InputError(
            f"queries and keys are (batch, heads, length, width), not {shapes}"
        )
    if q_BHQD.shape[0] != k_BGKD.shape[0] or q_BHQD.shape[3] != k_BGKD.shape[3]:
        raise InputError(f"queries and keys of shapes {shapes} do not agree")
    if causal and q_BHQD.shape[2] > k_BGKD.shape[2]:
        raise InputError(f"causal attention with more queries than keys: {shapes}")
