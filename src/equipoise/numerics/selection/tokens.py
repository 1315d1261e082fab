"""Attention rows together with the tokens they weigh: where every metric starts.

Axes, in this file:  x any leading axes (batch, key-value head) · Q query · K key ·
D width. Query heads that share keys and values are further queries.

Everything is computed in float64 (float32 where a device has none), because distances
come from inner products, ‖s − y‖² = ‖s‖² − 2⟨s, y⟩ + ‖y‖², which cancel when tokens
are alike: what is left of a distance is exact to about 1e-8 of ‖s‖.

Scores of a layer's heads, some queries at a time.

Axes, in this file:  B batch · H head · G key-value head · Q query · K key · D width ·
q queries of one block · k keys they see.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.errors import InputError

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class WeightedTokens:
    """y_i = α_i x_i for every query, never formed: weights, tokens and their products.

    Made by ``weighted_tokens``. Hidden keys weigh 0; a row with a weight or a visible
    token that is not finite is ``broken`` and reads NaN.
    """

    w_xQK: Float[Tensor, "*x Q K"]
    x_xKD: Float[Tensor, "*x K D"]
    seen_xQK: Bool[Tensor, "*x Q K"]
    rank_xQK: Int[Tensor, "*x Q K"]
    """0 for the key chosen first; hidden keys come last."""
    visible_xQ: Float[Tensor, "*x Q"]
    """How many keys each query sees."""
    broken_xQ: Bool[Tensor, "*x Q"]
    square_x1K: Float[Tensor, "*x 1 K"]
    """‖x_i‖²."""
    output_xQD: Float[Tensor, "*x Q D"]
    """Y = Σ y_i, the head's output."""
    onto_output_xQK: Float[Tensor, "*x Q K"]
    """⟨Y, y_i⟩."""

    @property
    def y_square_xQK(self) -> Float[Tensor, "*x Q K"]:
        """‖y_i‖²."""
        return self.w_xQK.square() * self.square_x1K

    def counted(self, top: int) -> Bool[Tensor, "*x Q"]:
        """Return rows with something left to tell apart: more than ``top`` keys."""
        return self.visible_xQ > top

    def reading(self, value_xQ: Tensor, top: int) -> Tensor:
        """Return the values with NaN in broken rows and in rows not counted."""
        silent = self.broken_xQ | ~self.counted(top)
        return value_xQ.masked_fill(silent, float("nan"))


@dataclass(frozen=True, slots=True)
class SelectedTokens:
    """A set of ``top`` keys per row and its context vector s = Σ_{i in the set} y_i."""

    given: WeightedTokens
    top: int
    inside_xQK: Bool[Tensor, "*x Q K"]
    context_xQD: Float[Tensor, "*x Q D"]
    onto_xQK: Float[Tensor, "*x Q K"]
    """⟨s, x_i⟩ of every key."""
    mass_xQ: Float[Tensor, "*x Q"]
    """Σα over the set."""

    @property
    def rest_xQK(self) -> Bool[Tensor, "*x Q K"]:
        """Visible keys that were not chosen."""
        return self.given.seen_xQK & ~self.inside_xQK

    @property
    def closeness_xQK(self) -> Float[Tensor, "*x Q K"]:
        """f_i = 2α_i⟨s, x_i⟩ − α_i²‖x_i‖² = ‖s‖² − ‖s − y_i‖²: orders by distance."""
        return 2 * self.given.w_xQK * self.onto_xQK - self.given.y_square_xQK

    @property
    def length_xQ(self) -> Float[Tensor, "*x Q"]:
        """‖s‖."""
        length_xQ: Tensor = self.context_xQD.norm(dim=-1)
        return length_xQ

    @property
    def distance_xQK(self) -> Float[Tensor, "*x Q K"]:
        """‖s − y_i‖ of every key."""
        return root(self.length_xQ.square()[..., None] - self.closeness_xQK)


def weighted_tokens(
    weights: Float[Tensor, "*x Q K"],
    tokens: Float[Tensor, "*x K D"],
    *,
    mask: Tensor | None = None,
) -> WeightedTokens:
    """Return rows of weights with their tokens, keys ranked by weight.

    Args:
        weights: Attention weights α; any normaliser's, so they need not sum to 1.
        tokens: What is weighed: value vectors, or hidden states.
        mask: True where a query sees a key. A hidden key is no token of its row; a
            visible one with weight 0 is.

    Ties go to the lower key, as in the follow-up's code.

    Example:
        >>> given = weighted_tokens(torch.tensor([[0.2, 0.8]]), torch.eye(2))
        >>> given.rank_xQK, given.output_xQD
        (tensor([[1, 0]]), tensor([[0.2000, 0.8000]], dtype=torch.float64))
    """
    _check(weights, tokens, mask)
    w_xQK, x_xKD = _wide(weights.detach()), _wide(tokens.detach())
    seen_xQK = torch.ones_like(w_xQK, dtype=torch.bool)
    if mask is not None:
        seen_xQK = mask.expand_as(w_xQK)
        w_xQK = w_xQK.masked_fill(~seen_xQK, 0.0)
    whole_xK = x_xKD.isfinite().all(-1)
    broken_xQ = ~(w_xQK.isfinite() & (whole_xK[..., None, :] | ~seen_xQK)).all(-1)
    x_xKD = x_xKD.masked_fill(~whole_xK[..., None], 0.0)
    w_xQK = w_xQK.masked_fill(broken_xQ[..., None], 0.0)
    output_xQD = w_xQK @ x_xKD
    return WeightedTokens(
        w_xQK=w_xQK,
        x_xKD=x_xKD,
        seen_xQK=seen_xQK,
        rank_xQK=_ranks(w_xQK.masked_fill(~seen_xQK, -torch.inf)),
        visible_xQ=seen_xQK.sum(-1).to(w_xQK.dtype),
        broken_xQ=broken_xQ,
        square_x1K=x_xKD.square().sum(-1)[..., None, :],
        output_xQD=output_xQD,
        onto_output_xQK=w_xQK * (output_xQD @ x_xKD.mT),
    )


def ranked_at_random(
    given: WeightedTokens, generator: torch.Generator
) -> WeightedTokens:
    """Return the same rows with visible keys in a random order: the control.

    One permutation serves every query, each reading off its own visible keys: for each
    query all orders are equally likely, though two queries' orders are related.
    """
    K = given.w_xQK.shape[-1]
    order_K = torch.randperm(K, generator=generator).to(given.w_xQK.device)
    place_K = torch.empty_like(order_K).scatter_(
        0, order_K, torch.arange(K).to(order_K)
    )
    seen_xQK = given.seen_xQK[..., order_K]
    count_xQK = seen_xQK.cumsum(-1)
    hidden_xQK = count_xQK[..., -1:] + (~seen_xQK).cumsum(-1)
    rank_xQK = torch.where(seen_xQK, count_xQK, hidden_xQK) - 1
    return replace(given, rank_xQK=rank_xQK[..., place_K])


def chosen(given: WeightedTokens, top: int) -> SelectedTokens:
    """Return the ``top`` keys ranked first and the products every metric needs.

    Two matrix products: O(K·D) per query.
    """
    if top < 1:
        raise InputError(f"top {top}: a selection holds at least one key")
    inside_xQK = given.rank_xQK < top
    inside_xQK &= given.seen_xQK
    w_xQK = given.w_xQK * inside_xQK
    context_xQD = w_xQK @ given.x_xKD
    onto_xQK = context_xQD @ given.x_xKD.mT
    return SelectedTokens(given, top, inside_xQK, context_xQD, onto_xQK, w_xQK.sum(-1))


def _ranks(w_xQK: Tensor) -> Tensor:
    order_xQK = w_xQK.sort(dim=-1, descending=True, stable=True).indices
    places_K = torch.arange(w_xQK.shape[-1], device=w_xQK.device)
    return torch.empty_like(order_xQK).scatter_(
        -1, order_xQK, places_K.expand_as(w_xQK)
    )


def root(square: Tensor) -> Tensor:
    """Return the square root of a difference that rounding may have made negative."""
    return square.clamp_min(0.0).sqrt()


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "mps" else x.double()


def _check(weights: Tensor, tokens: Tensor, mask: Tensor | None) -> None:
    for name, given in (("weights", weights), ("tokens", tokens)):
        if given.dtype not in _FLOATS or given.ndim < 2:
            raise InputError(
                f"{name} must be a float tensor of at least two axes, not "
                f"{given.dtype} of shape {tuple(given.shape)}"
            )
    same = weights.shape[:-2] == tokens.shape[:-2]
    if not same or weights.shape[-1] != tokens.shape[-2] or 0 in weights.shape:
        raise InputError(
            f"weights {tuple(weights.shape)} are (…, queries, keys) and tokens "
            f"{tuple(tokens.shape)} are (…, keys, width): they must agree"
        )
    if mask is not None and mask.dtype != torch.bool:
        raise InputError(f"mask must be boolean, True where visible, not {mask.dtype}")


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
    _check_scores(q_BHQD, k_BGKD, causal)
    q_BHQD, k_BGKD = _wide_scores(q_BHQD) * scale, _wide_scores(k_BGKD)
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


def _wide_scores(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _check_scores(q_BHQD: Tensor, k_BGKD: Tensor, causal: bool) -> None:
    shapes = f"{tuple(q_BHQD.shape)} and {tuple(k_BGKD.shape)}"
    if q_BHQD.ndim != 4 or k_BGKD.ndim != 4 or q_BHQD.shape[1] % k_BGKD.shape[1]:
        raise InputError(
            f"queries and keys are (batch, heads, length, width), not {shapes}"
        )
    if q_BHQD.shape[0] != k_BGKD.shape[0] or q_BHQD.shape[3] != k_BGKD.shape[3]:
        raise InputError(f"queries and keys of shapes {shapes} do not agree")
    if causal and q_BHQD.shape[2] > k_BGKD.shape[2]:
        raise InputError(f"causal attention with more queries than keys: {shapes}")
