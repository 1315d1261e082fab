"""Heads of a layer by their weights.

Axes, in this file:  H head · G key-value head · R head width · D model width.
"""

import math

import torch
from torch import Tensor

from equipoise.auditing.weights.layout import AttentionLayout


def head_values(
    attention: AttentionLayout, maps: dict[str, Tensor]
) -> dict[str, list[float]]:
    """Return per head: norms of products and factors, and the head most like it.

    Nothing where a map does not divide into its heads, or is not finite.
    """
    H, G = attention.heads, attention.kv_heads
    assert H is not None and G is not None
    stacks = {
        letter: by_head
        for letter, matrix in maps.items()
        if (by_head := _by_head(matrix, letter, G if letter in "kv" else H)) is not None
    }
    if len(stacks) < 4 or not all(bool(s.isfinite().all()) for s in stacks.values()):
        return {}
    grams = {
        letter: _gram(stack).repeat_interleave(H // G if letter in "kv" else 1, 0)
        for letter, stack in stacks.items()
    }
    found = _likeness(stacks, H // G)
    for a, b in ("qk", "vo"):
        if grams[a].shape == grams[b].shape:
            found[f"projection.{a}{b}"] = product_norms(grams[a], grams[b])
    for letter in "qk":
        top_H = torch.linalg.eigvalsh(grams[letter])[:, -1]
        found[f"weights.head.{letter}"] = top_H.clamp_min(0).sqrt().tolist()
    return found


def _by_head(matrix: Tensor, letter: str, heads: int) -> Tensor | None:
    rows = matrix.mT if letter == "o" else matrix
    return None if rows.shape[0] % heads else rows.unflatten(0, (heads, -1))


def _gram(stack_HRD: Tensor) -> Tensor:
    """Return R × R Gram matrices in float64: their roots keep eight digits."""
    wide_HRD = stack_HRD.double()
    return wide_HRD @ wide_HRD.mT


def product_norms(gram_a_HRR: Tensor, gram_b_HRR: Tensor) -> list[float]:
    """Return ‖AᵀB‖₂ of every head as √λ_max(G_A^½ G_B G_A^½).

    Example:
        >>> a = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))[None]
        >>> [round(x, 6) for x in product_norms(a @ a, a @ a)]
        [9.0]
    """
    values_HR, vectors_HRR = torch.linalg.eigh(gram_a_HRR)
    root_HRR = vectors_HRR * values_HR.clamp_min(0).sqrt()[:, None]
    inner_HRR = root_HRR.mT @ gram_b_HRR @ root_HRR
    top_H = torch.linalg.eigvalsh((inner_HRR + inner_HRR.mT) / 2)[:, -1]
    norms: list[float] = top_H.clamp_min(0).sqrt().tolist()
    return norms


def _likeness(stacks: dict[str, Tensor], shared: int) -> dict[str, list[float]]:
    """Return the head each head resembles most, and by how much (the least cosine).

    Heads that share keys and values by design are compared by queries and outputs.
    """
    H = len(stacks["q"])
    if H < 2:
        return {}
    cosine_HH = torch.full((H, H), math.inf)
    for letter in "qkvo" if shared == 1 else "qo":
        flat = torch.nn.functional.normalize(stacks[letter].flatten(1), dim=1)
        cosine_HH = torch.minimum(cosine_HH, flat @ flat.mT)
    most_H, other_H = cosine_HH.fill_diagonal_(-1).max(1)
    return {
        "weights.head.likeness": most_H.tolist(),
        "weights.head.nearest": [float(h) for h in other_H.tolist()],
    }
