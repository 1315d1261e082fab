"""Heads of a layer by their weights, and the Lipschitz bounds made of them.

Axes, in this file:  H head · G key-value head · R head width · D model width.
"""

import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from equipoise.auditing.weights.entries import Checkpoint
from equipoise.auditing.weights.layout import (
    DOWN,
    FUSED_GATE,
    GATE,
    UP,
    AttentionLayout,
    block_of,
)

Values = Mapping[str, Mapping[str, tuple[float, ...]]]
"""Quantity → site → values."""
STEEPEST = 1.13
"""max|φ'| of GELU, the largest among the activations in use (SiLU 1.10, ReLU 1)."""
BOUND = ("projection.vo", "weights.head.q", "weights.head.k")


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


def layer_bounds(
    checkpoint: Checkpoint, sites: list[AttentionLayout], values: Values
) -> Iterator[tuple[str, str, float]]:
    """Yield log₁₀ of Lipschitz bounds, for tokens as long as a norm lets them be."""
    gains = values.get("weights.gain", {})
    projections = {name for attention in sites for name in attention.tensors}
    bounds = _feedforward(checkpoint, values, projections)
    for attention in sites:
        shape = checkpoint.entries[attention.q.tensor].shape
        radius = _radius(gains, block_of(attention.site), shape[-1])
        heads = [values.get(name, {}).get(attention.site, ()) for name in BOUND]
        if all(heads):
            width = shape[0] / len(heads[0])
            total = sum(
                vo * (1 + 2 * radius**2 * q * k / math.sqrt(max(width, 1)))
                for vo, q, k in zip(*heads, strict=True)
            )
            yield "weights.bound.attention", attention.site, _log(total)
    for block, bound in bounds.items():
        yield "weights.bound.feedforward", block, _log(bound)


def _radius(gains: Mapping[str, tuple[float, ...]], block: str, width: int) -> float:
    own = [g[0] for name, g in gains.items() if block and block_of(name) == block]
    return max(own, default=1.0) * math.sqrt(width)


def _feedforward(
    checkpoint: Checkpoint, values: Values, projections: Collection[str]
) -> dict[str, float]:
    """Block → ‖W_down‖·‖W_up‖·max|φ'|; a gate multiplies by ‖W_gate‖ and the token.

    No bound of a block of which a map was not measured.
    """
    products: dict[str, float] = {}
    norms, gains = values.get("weights.norm", {}), values.get("weights.gain", {})
    for name, entry in checkpoint.entries.items():
        block, part = block_of(name), UP.search(name) or DOWN.search(name)
        # BERT's W_O is named like a feed-forward map: output.dense.
        if not block or not part or "expert" in name or name in projections:
            continue
        (norm, *_) = norms.get(name, (math.nan,))
        product = products.get(block, STEEPEST) * norm
        if GATE.search(name):
            product *= (1 + 1 / STEEPEST) * _radius(gains, block, entry.shape[-1])
        if FUSED_GATE.search(name):  # each half is at most as large as the whole
            product *= norm
        products[block] = product
    return {name: bound for name, bound in products.items() if not math.isnan(bound)}


def _log(value: float) -> float:
    return math.log10(value) if value > 0 else math.nan if value != 0 else -math.inf
