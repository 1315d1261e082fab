"""Every head of a layer, every query, in blocks: what selection looks like there.

Axes, in this file:  B batch · H head · G key-value head · Q query · K key · D width of
queries and keys · F width of tokens · q queries of one block · k keys they see ·
x batch and key-value head together · T sizes tried.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.normalisers import Normaliser, rows
from equipoise.numerics.normalisers.exponential import Softmax
from equipoise.numerics.selection.concentration import concentration
from equipoise.numerics.selection.distance import distance_of, published_bound
from equipoise.numerics.selection.joining import joined
from equipoise.numerics.selection.readings import AtSizes, Selection, Wanted
from equipoise.numerics.selection.rows import (
    Chosen,
    WeightedTokens,
    chosen,
    ranked_at_random,
    weighted_tokens,
)
from equipoise.numerics.selection.scores import score_blocks
from equipoise.numerics.selection.separability import Separability, separability_of

# Weights worked on at once: half a MiB of float64 a table.
WEIGHTS = 1 << 16
Blocks = Iterable[tuple[slice, Tensor]]


def selection_of_heads(
    q_BHQD: Float[Tensor, "B H Q D"],
    k_BGKD: Float[Tensor, "B G K D"],
    tokens_BGKF: Float[Tensor, "B G2 K F"],
    *,
    wanted: Wanted | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    temperature: float = 1.0,
    normaliser: Normaliser | None = None,
) -> Selection:
    """Return the selection metrics of attention from queries, keys and tokens.

    Memory stays O(block × K); scores are never whole.

    Args:
        q_BHQD: Queries, any float dtype.
        k_BGKD: Keys; G divides H (grouped-query attention).
        tokens_BGKF: What the weights weigh: values (B, G, K, F), or hidden states as
            (B, 1, K, F). The paper does not say which; its follow-up takes values.
        wanted: Sizes and parts.
        mask: Broadcastable to (B, H, Q, K); boolean with True where visible, or
            additive with -inf.
        causal: Key j is visible to query i where j ≤ i + K − Q.
        scale: Multiplies q·k; 1/√D unless given.
        temperature: τ, which divides the scores.
        normaliser: Softmax unless given.

    Example:
        >>> rng = torch.Generator().manual_seed(0)
        >>> q, k, v = torch.randn(3, 1, 2, 16, 8, generator=rng)
        >>> found = selection_of_heads(q, k, v, wanted=Wanted(tops=(1, 4)), causal=True)
        >>> found.at.euclidean.recall.shape, found.concentration.rho.shape
        (torch.Size([1, 2, 16, 2]), torch.Size([1, 2, 16]))
    """
    scale = q_BHQD.shape[-1] ** -0.5 if scale is None else scale
    blocks = score_blocks(q_BHQD, k_BGKD, scale=scale, mask=mask, causal=causal)
    return selection_of_blocks(
        blocks,
        tokens_BGKF,
        wanted=wanted,
        temperature=temperature,
        normaliser=normaliser,
    )


def selection_of_blocks(
    blocks: Blocks,
    tokens_BGKF: Float[Tensor, "B G K F"],
    *,
    wanted: Wanted | None = None,
    temperature: float = 1.0,
    normaliser: Normaliser | None = None,
) -> Selection:
    """Return the metrics from blocks of scores, as ``AttentionCall.blocks`` gives them.

    Args:
        blocks: (queries, scores_BHqk) with hidden keys at -inf; k may stop early, where
            no query of the block sees further.
        tokens_BGKF: As for ``selection_of_heads``.
        wanted: Sizes and parts.
        temperature: τ, which divides the scores.
        normaliser: Softmax unless given.
    """
    wanted, rule = wanted or Wanted(), normaliser or Softmax()
    rng = torch.Generator().manual_seed(wanted.seed)
    flat, parts = [], []
    for _, z_BHqk in blocks:
        given = rows(z_BHqk, temperature=temperature)
        w_BHqk = rule.weights(given)
        flat.append(concentration(z_BHqk, temperature=temperature, weights=w_BHqk))
        parts.append(_block(w_BHqk, given.seen_xK, tokens_BGKF, wanted, rng))
    if not parts:
        raise InputError("no block of scores: there is nothing to measure")
    cat = partial(torch.cat, dim=2)
    return Selection(
        tops=wanted.tops, concentration=joined(flat, cat), at=joined(parts, cat)
    )


def selection_of_weights(
    weights_BHQK: Float[Tensor, "B H Q K"],
    tokens_BGKF: Float[Tensor, "B G K F"],
    *,
    wanted: Wanted | None = None,
    mask: Tensor | None = None,
) -> AtSizes:
    """Return the metrics per size where only the weights are known, not the scores.

    Example:
        >>> w = torch.full((1, 1, 1, 8), 0.125)
        >>> found = selection_of_weights(w, torch.ones(1, 1, 8, 1))
        >>> found.distance.value[0, 0, 0, 2]  # L = 8, N = 4, all alike: L/4 − ½
        tensor(1.5000, dtype=torch.float64)
    """
    wanted = wanted or Wanted()
    rng = torch.Generator().manual_seed(wanted.seed)
    seen = None if mask is None else mask.expand_as(weights_BHQK)
    return _block(weights_BHQK, seen, tokens_BGKF, wanted, rng)


def _block(
    w_BHqk: Tensor,
    seen_BHqk: Tensor | None,
    tokens_BGKF: Tensor,
    wanted: Wanted,
    rng: torch.Generator,
) -> AtSizes:
    """Return the readings of one block, a few rows at a time."""
    B, H, q, k = w_BHqk.shape
    G = tokens_BGKF.shape[1]
    if tokens_BGKF.shape[0] != B or H % G or tokens_BGKF.shape[2] < k:
        raise InputError(
            f"weights of {B} sequences, {H} heads and {k} keys do not fit tokens of "
            f"shape {tuple(tokens_BGKF.shape)}: (batch, heads or groups, keys, width)"
        )
    # Heads that share their tokens are further queries: nothing is repeated.
    w_xQk = w_BHqk.reshape(B * G, H // G * q, k)
    x_xkF = tokens_BGKF[:, :, :k].reshape(B * G, k, -1)
    seen_xQk = None if seen_BHqk is None else seen_BHqk.reshape(w_xQk.shape)
    found = []
    for x, Q in _pieces(w_xQk):
        mask = None if seen_xQk is None else seen_xQk[x, Q]
        given = weighted_tokens(w_xQk[x, Q], x_xkF[x], mask=mask)
        read = _at_sizes(given, wanted, rng)
        found.append(joined([read], lambda one: one[0].flatten(0, 1)))
    whole = joined(found, torch.cat)
    return joined([whole], lambda one: one[0].reshape(B, H, q, -1))


def _pieces(w_xQk: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of (x, Q) in order, each of about WEIGHTS weights."""
    X, Q, k = w_xQk.shape
    some = max(1, WEIGHTS // k)
    for x in range(0, X, max(1, some // Q)):
        for at in range(0, Q, some):
            yield slice(x, x + max(1, some // Q)), slice(at, at + some)


def _at_sizes(given: WeightedTokens, wanted: Wanted, rng: torch.Generator) -> AtSizes:
    orders = [ranked_at_random(given, rng) for _ in range(wanted.random)]
    found = []
    for top in wanted.tops:
        picked = chosen(given, top)
        control = [_separable(chosen(order, top)) for order in orders]
        means = joined(control, _mean) if control else (None, None)
        both = _separable(picked) if wanted.separability else (None, None)
        found.append(
            AtSizes(
                distance=distance_of(picked) if wanted.distance else None,
                published=published_bound(picked) if wanted.published else None,
                euclidean=both[0],
                cosine=both[1],
                random_euclidean=means[0],
                random_cosine=means[1],
            )
        )
    return joined(found, partial(torch.stack, dim=-1))


def _separable(picked: Chosen) -> tuple[Separability, Separability]:
    return separability_of(picked), separability_of(picked, metric="cosine")


def _mean(draws: list[Tensor]) -> Tensor:
    return torch.stack(draws).mean(0)
