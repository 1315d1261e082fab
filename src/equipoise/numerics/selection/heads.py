"""Every head of a layer, every query, in blocks: what selection looks like there.

Axes, in this file:  B batch · H head · G key-value head · Q query · K key · D width of
queries and keys · F width of tokens · q queries of one block · k keys they see ·
x batch and key-value head together · T sizes tried.

Readings of several blocks, sizes or draws become one, field by field.

What to measure of a layer's heads, what was measured, and its mean per head.

Axes, in this file:  B batch · H head · Q query · T sizes tried · x any leading axes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.normalisers import Normaliser, rows
from equipoise.numerics.normalisers.closed_form import Softmax
from equipoise.numerics.selection.concentration import Concentration, concentration
from equipoise.numerics.selection.distance import (
    Distance,
    Separability,
    distance_of,
    published_bound,
    separability_of,
)
from equipoise.numerics.selection.tokens import (
    SelectedTokens,
    WeightedTokens,
    chosen,
    ranked_at_random,
    score_blocks,
    weighted_tokens,
)

Readings = TypeVar("Readings")
How = Callable[[list[Tensor]], Tensor]


def joined(parts: Sequence[Readings], how: How) -> Readings:
    """Return the parts' tensors put together by ``how``; a part left out stays None.

    Example:
        >>> import torch
        >>> joined([(torch.ones(1), None), (torch.zeros(2), None)], torch.cat)
        (tensor([1., 0., 0.]), None)
    """
    whole: Readings = _joined(parts, how)
    return whole


def _joined(parts: Sequence[Any], how: How) -> Any:
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return how(list(parts))
    if isinstance(first, tuple):
        columns = [_joined(column, how) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    names = [field.name for field in fields(first)]
    return type(first)(
        **{n: _joined([getattr(part, n) for part in parts], how) for n in names}
    )


TOPS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMetricOptions:
    """What to measure; each part can be left out where only another is needed."""

    tops: tuple[int, ...] = TOPS
    """Sizes of selection; each costs two matrix products per block."""
    distance: bool = True
    """d̃, its bounds and its expectation."""
    published: bool = False
    """Theorem 1's own bound as well: N passes over the keys."""
    separability: bool = True
    """Recall, precision and margin, Euclidean and cosine."""
    random: int = 0
    """Random rankings as a control; each costs as much as the true one."""
    seed: int = 0
    """Of the random rankings."""

    def __post_init__(self) -> None:
        if not self.tops or min(self.tops) < 1 or self.random < 0:
            raise InputError(
                f"tops {self.tops}, random {self.random}: give sizes of at least 1 and "
                "a number of random rankings"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AtSizes:
    """Readings of shape (…, T): one per size. A part not asked for is None."""

    distance: Distance | None = None
    published: Float[Tensor, "*x T"] | None = None
    euclidean: Separability | None = None
    cosine: Separability | None = None
    random_euclidean: Separability | None = None
    random_cosine: Separability | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Readings of every query of every head: (B, H, Q), and (B, H, Q, T) per size."""

    tops: tuple[int, ...]
    concentration: Concentration
    at: AtSizes

    def per_head(
        self, counted_BQ: Bool[Tensor, "B Q"] | None = None
    ) -> dict[str, Tensor]:
        """Return every reading's mean over queries: name → (H,) or (H, T).

        Queries without a reading (no more visible keys than chosen ones) are left out,
        as are those where ``counted_BQ`` is False (padding). A reading of NaN makes no
        mean NaN here: see ``broken``.
        """
        found = {}
        for name, value in _named(self):
            if counted_BQ is not None:
                out = ~counted_BQ[:, None, :].to(value.device)
                out = out if value.ndim == 3 else out[..., None]
                value = value.masked_fill(out, float("nan"))
            found[name] = value.transpose(0, 1).flatten(1, 2).nanmean(1)
        return found

    @property
    def broken(self) -> int:
        """Rows whose scores held NaN or +inf: they have no reading."""
        return int(self.concentration.p_max.isnan().sum())


def _named(found: Selection) -> Iterator[tuple[str, Tensor]]:
    seen = found.concentration
    visible = seen.visible > 1  # one key: nothing to select from
    for name in ("rho", "p_max", "entropy", "entropy_floor", "evenness"):
        yield name, getattr(seen, name).masked_fill(~visible, float("nan"))
    yield "weight.upper", seen.weight.upper.masked_fill(~visible, float("nan"))
    if found.at.distance is not None:
        yield from _of_distance(found.at.distance)
    if found.at.published is not None:
        yield "distance.published", found.at.published
    for prefix in ("euclidean", "cosine", "random_euclidean", "random_cosine"):
        part: Separability | None = getattr(found.at, prefix)
        if part is not None:
            for name in ("recall", "precision", "f", "margin"):
                yield f"{prefix}.{name}", getattr(part, name)


def _of_distance(at: Distance) -> Iterator[tuple[str, Tensor]]:
    yield "distance", at.value
    for name in ("upper", "lower", "per_token", "lift_lower", "lift_upper"):
        yield f"distance.{name}", getattr(at, name)
    yield "distance.expected_lower", at.expected_lower
    yield "distance.expected_upper", at.expected_upper


# Weights worked on at once: half a MiB of float64 a table.
WEIGHTS = 1 << 16
Blocks = Iterable[tuple[slice, Tensor]]


def selection_of_heads(
    q_BHQD: Float[Tensor, "B H Q D"],
    k_BGKD: Float[Tensor, "B G K D"],
    tokens_BGKF: Float[Tensor, "B G2 K F"],
    *,
    wanted: HeadMetricOptions | None = None,
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
        >>> found = selection_of_heads(
        ...     q, k, v, wanted=HeadMetricOptions(tops=(1, 4)), causal=True
        ... )
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
    wanted: HeadMetricOptions | None = None,
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
    wanted, rule = wanted or HeadMetricOptions(), normaliser or Softmax()
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
    wanted: HeadMetricOptions | None = None,
    mask: Tensor | None = None,
) -> AtSizes:
    """Return the metrics per size where only the weights are known, not the scores.

    Example:
        >>> w = torch.full((1, 1, 1, 8), 0.125)
        >>> found = selection_of_weights(w, torch.ones(1, 1, 8, 1))
        >>> found.distance.value[0, 0, 0, 2]  # L = 8, N = 4, all alike: L/4 − ½
        tensor(1.5000, dtype=torch.float64)
    """
    wanted = wanted or HeadMetricOptions()
    rng = torch.Generator().manual_seed(wanted.seed)
    seen = None if mask is None else mask.expand_as(weights_BHQK)
    return _block(weights_BHQK, seen, tokens_BGKF, wanted, rng)


def _block(
    w_BHqk: Tensor,
    seen_BHqk: Tensor | None,
    tokens_BGKF: Tensor,
    wanted: HeadMetricOptions,
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


def _at_sizes(
    given: WeightedTokens, wanted: HeadMetricOptions, rng: torch.Generator
) -> AtSizes:
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


def _separable(picked: SelectedTokens) -> tuple[Separability, Separability]:
    return separability_of(picked), separability_of(picked, metric="cosine")


def _mean(draws: list[Tensor]) -> Tensor:
    return torch.stack(draws).mean(0)
