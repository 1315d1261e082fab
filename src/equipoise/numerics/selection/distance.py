"""How far the chosen tokens' sum lies from all the others: d̃ of Mudarisov et al.

Axes, in this file:  x any leading axes · Q query · K key · D width. n visible keys,
N chosen, α weights, y_i = α_i x_i, s = Σ_{i∈I} y_i, ᾱ = Σ_{i∈I} α_i, c = s/ᾱ.

Can the chosen tokens be told from the rest by their distance to their own sum?

Axes, in this file:  x any leading axes · Q query · K key · D width.
D_i = dist(y_i, s), y_i = α_i x_i, s = Σ_{i∈I} y_i; ρ_min = min_{j∉I} D_j, ρ_max =
max_{i∈I} D_i. Strict, after the authors' follow-up: with r = ρ_min the nearest token
outside lies on the closed ball of the first paper.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.selection.tokens import (
    SelectedTokens,
    WeightedTokens,
    chosen,
    ranked_at_random,
    root,
)

RESOLUTION = 1e-6
"""Distances come from inner products that cancel: below this part of the lengths
involved they are rounding, and one CPU's zero is another's 1e-9."""

PerQuery = Float[Tensor, "*x Q"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """d̃ = Σ_{i∉I} ‖s − y_i‖ of each query, between its bounds, and what chance gives.

    NaN where a query sees no more than N keys.
    """

    value: PerQuery
    upper: PerQuery
    """Ours: Σ|α_i|‖x_i − c‖ + ‖c‖ Σ|ᾱ − α_i| over i∉I; any set, any weights."""
    lower: PerQuery
    """Ours: max(0, (n − N)‖s‖ − Σ_{i∉I} |α_i|‖x_i‖)."""
    expected_lower: PerQuery
    """E[d̃] over random sets is at least this, the main term of Theorem 1 (2)."""
    expected_upper: PerQuery
    per_token: PerQuery
    """d̃/(n − N): comparable across lengths and sizes."""
    size: PerQuery
    """(1−N/n)(N+1) Σ‖y_i‖: no E[d̃] is larger, whatever the directions."""

    @property
    def lift_lower(self) -> PerQuery:
        """d̃/E[d̃] is at least this: how much further than chance the choice stands.

        NaN where tokens are so alike that E[d̃] is zero but for rounding: no choice
        stands further than another then.
        """
        known_xQ = self.expected_upper > RESOLUTION * self.size
        return torch.where(known_xQ, self.value / self.expected_upper, torch.nan)

    @property
    def lift_upper(self) -> PerQuery:
        """d̃/E[d̃] is at most this: infinite where the lower bound of E[d̃] is zero."""
        known_xQ = ~(self.expected_lower <= RESOLUTION * self.size)
        return torch.where(known_xQ, self.value / self.expected_lower, torch.inf)


def distance(given: WeightedTokens, top: int) -> Distance:
    """Return d̃ of the ``top`` first-ranked keys, its bounds and its expectation.

    Example:
        >>> from equipoise.numerics.selection.tokens import weighted_tokens
        >>> flat, same = torch.full((1, 8), 1 / 8), torch.ones(8, 1)
        >>> distance(weighted_tokens(flat, same), 4).value  # L/4 − ½
        tensor([1.5000], dtype=torch.float64)
    """
    return distance_of(chosen(given, top))


def distance_of(picked: SelectedTokens) -> Distance:
    """Return the same of a set already chosen, by weight or otherwise."""
    given, top = picked.given, picked.top
    rest_xQK = picked.rest_xQK.to(given.w_xQK.dtype)  # once: products read it thrice
    value_xQ = (picked.distance_xQK * rest_xQK).sum(-1)
    upper_xQ, lower_xQ = _bounds(picked, rest_xQK)
    least_xQ, most_xQ = expected_distance(given, top)
    return Distance(
        value=given.reading(value_xQ, top),
        upper=given.reading(upper_xQ, top),
        lower=given.reading(lower_xQ, top),
        expected_lower=least_xQ,
        expected_upper=most_xQ,
        per_token=given.reading(value_xQ / (given.visible_xQ - top), top),
        size=given.reading(_size(given, top), top),
    )


def _bounds(picked: SelectedTokens, rest_xQK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (upper, lower) from y_i − s = α_i(x_i − c) + (α_i − ᾱ)c.

    With ᾱ = 0 there is no c; the same split around 0, ‖y_i‖ + ‖s‖, takes its place.
    """
    given, w_xQK = picked.given, picked.given.w_xQK
    s_xQ, mass_xQ = picked.length_xQ, picked.mass_xQ
    by_xQ = torch.where(mass_xQ != 0, mass_xQ, torch.inf)[..., None]
    off_xQK = given.square_x1K - 2 * picked.onto_xQK / by_xQ
    off_xQK = root(off_xQK + (s_xQ[..., None] / by_xQ).square())
    apart_xQK = (mass_xQ[..., None] - w_xQK).abs() * (s_xQ[..., None] / by_xQ.abs())
    alone_xQK = s_xQ[..., None].expand_as(apart_xQK)
    apart_xQK = torch.where(mass_xQ[..., None] != 0, apart_xQK, alone_xQK)
    weigh_xQK = w_xQK.abs() * rest_xQK
    upper_xQ = (weigh_xQK * off_xQK + apart_xQK * rest_xQK).sum(-1)
    spread_xQ = (weigh_xQK * given.square_x1K.sqrt()).sum(-1)
    far_xQ = (given.visible_xQ - picked.top) * s_xQ
    return upper_xQ, (far_xQ - spread_xQ).clamp_min(0.0)


def expected_distance(given: WeightedTokens, top: int) -> tuple[Tensor, Tensor]:
    """Return bounds of E[d̃] over all sets of ``top`` visible keys, at O(K) a query.

    With i outside, the set's sum has mean N/(n−1)·(Y − y_i) and, drawn without
    replacement, variance V_i. Jensen below, E‖z‖ ≤ √E‖z‖² above:

        (n−N)/n Σ m_i ≤ E[d̃] ≤ min{(n−N)/n Σ √(m_i² + V_i), (1−N/n)(N+1) Σ‖y_i‖}.
    """
    n_xQ1 = given.visible_xQ[..., None]
    own_xQK, onto_xQK = given.y_square_xQK, given.onto_output_xQK
    whole_xQ1 = given.output_xQD.square().sum(-1, keepdim=True)
    share_xQ1 = top / (n_xQ1 - 1)
    mean_xQK = (1 + share_xQ1).square() * own_xQK + share_xQ1.square() * whole_xQ1
    mean_xQK = mean_xQK - 2 * share_xQ1 * (1 + share_xQ1) * onto_xQK
    others_xQK = own_xQK.sum(-1, keepdim=True) - own_xQK
    centre_xQK = (whole_xQ1 - 2 * onto_xQK + own_xQK).clamp_min(0.0) / (n_xQ1 - 1)
    spread_xQK = (others_xQK - centre_xQK).clamp_min(0.0) * _per_pair(n_xQ1, top)
    mean_xQK = mean_xQK.clamp_min(0.0)
    left_xQ = 1 - top / n_xQ1[..., 0]
    seen_xQK = given.seen_xQK.to(mean_xQK.dtype)
    lower_xQ = left_xQ * (mean_xQK.sqrt() * seen_xQK).sum(-1)
    upper_xQ = left_xQ * ((mean_xQK + spread_xQK).sqrt() * seen_xQK).sum(-1)
    upper_xQ = torch.minimum(upper_xQ, _size(given, top))
    return given.reading(lower_xQ, top), given.reading(upper_xQ, top)


def _size(given: WeightedTokens, top: int) -> Tensor:
    lengths_xQ = (given.w_xQK.abs() * given.square_x1K.sqrt()).sum(-1)
    return (1 - top / given.visible_xQ) * (top + 1) * lengths_xQ


def _per_pair(n_xQ1: Tensor, top: int) -> Tensor:
    """Return N(n−1−N)/((n−1)(n−2)); with two keys there is nothing to vary."""
    pairs = (n_xQ1 - 1) * (n_xQ1 - 2)
    return torch.where(pairs > 0, top * (n_xQ1 - 1 - top) / pairs, 0.0)


def published_bound(picked: SelectedTokens) -> PerQuery:
    """Return Theorem 1's bound, (A−ᾱ)·d₁ + max_{j∈I}‖x_j‖·Σ_{i∉I}|ᾱ − α_i|.

    d₁ is the largest distance between a chosen and another visible token, A = Σα (1 in
    the paper). For the N largest weights the last sum is the paper's ᾱ(n−N) − (1−ᾱ);
    written out, the bound holds for any set of non-negative weights; NaN for a row
    with a negative one. Costs N passes over the keys after one K × K table of
    distances, where ours costs none.
    """
    given, rest_xQK = picked.given, picked.rest_xQK
    apart_xKK = torch.cdist(given.x_xKD, given.x_xKD)
    widest_xQ = torch.zeros_like(picked.mass_xQ)
    for place in range(picked.top):
        at_xQ1 = (given.rank_xQK == place).byte().argmax(-1, keepdim=True)
        row_xQK = torch.take_along_dim(apart_xKK, at_xQ1.expand_as(given.w_xQK), -2)
        widest_xQ = widest_xQ.maximum((row_xQK * rest_xQK).amax(-1))
    length_xQK = given.square_x1K.sqrt() * picked.inside_xQK
    gap_xQK = (picked.mass_xQ[..., None] - given.w_xQK).abs() * rest_xQK
    left_xQ = (given.w_xQK * rest_xQK).sum(-1)
    bound_xQ = left_xQ * widest_xQ + length_xQK.amax(-1) * gap_xQK.sum(-1)
    bound_xQ = bound_xQ.masked_fill((given.w_xQK < 0).any(-1), float("nan"))
    return given.reading(bound_xQ, picked.top)


Metric = Literal["euclidean", "cosine"]
# Differences of this many ulp of ‖s‖² are ties: rounding must not decide who is nearer.
_TIE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Separability:
    """How well a ball around s holds the chosen tokens and nothing else, per query.

    NaN where a query sees no more than N keys.
    """

    recall: PerQuery
    """|{i∈I : D_i < ρ_min}|/N, the paper's N_s/N."""
    precision: PerQuery
    """N/(N + |{j∉I : D_j ≤ ρ_max}|)."""
    margin: PerQuery
    """ρ_min − ρ_max; positive when one ball separates perfectly."""

    @property
    def f(self) -> PerQuery:
        """2PR/(P+R), P never 0."""
        return 2 * self.precision * self.recall / (self.precision + self.recall)


def separability(
    given: WeightedTokens, top: int, *, metric: Metric = "euclidean"
) -> Separability:
    """Return recall, precision and margin of the ``top`` first-ranked keys.

    Exact, at O(K·D) per query: D_i is ordered by f_i = 2α_i⟨s, x_i⟩ − α_i²‖x_i‖²,
    which needs one inner product per key and no pair of tokens.

    Example:
        >>> from equipoise.numerics.selection.tokens import weighted_tokens
        >>> w = torch.tensor([[0.2, 0.2, 0.2, 0.2, 0.1, 0.1]])
        >>> found = separability(weighted_tokens(w, torch.eye(6)), 4)
        >>> found.recall, found.precision
        (tensor([1.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    return separability_of(chosen(given, top), metric=metric)


def separability_of(
    picked: SelectedTokens, *, metric: Metric = "euclidean"
) -> Separability:
    """Return the same of a set already chosen, by weight or otherwise."""
    if metric not in _NEARNESS:
        raise InputError(f"metric {metric!r}: give one of {', '.join(_NEARNESS)}")
    near_xQK, scale_xQ, radius = _NEARNESS[metric](picked)
    tie_xQ = _TIE * torch.finfo(near_xQK.dtype).eps * scale_xQ
    inside_xQK, rest_xQK = picked.inside_xQK, picked.rest_xQK
    best_xQ = near_xQK.masked_fill(~rest_xQK, -torch.inf).amax(-1)
    worst_xQ = near_xQK.masked_fill(~inside_xQK, torch.inf).amin(-1)
    found_xQ = (inside_xQK & (near_xQK > (best_xQ + tie_xQ)[..., None])).sum(-1)
    false_xQ = (rest_xQK & (near_xQK >= (worst_xQ - tie_xQ)[..., None])).sum(-1)
    top, wide = picked.top, near_xQK.dtype
    return Separability(
        recall=picked.given.reading(found_xQ.to(wide) / top, top),
        precision=picked.given.reading(top / (top + false_xQ.to(wide)), top),
        margin=picked.given.reading(radius(best_xQ) - radius(worst_xQ), top),
    )


def random_separability(
    given: WeightedTokens,
    top: int,
    *,
    generator: torch.Generator,
    draws: int = 16,
) -> Separability:
    """Return the means over random rankings, each around its own sum: the control."""
    if draws < 1:
        raise InputError(f"draws {draws}: the control needs at least one ranking")
    found = [
        separability(ranked_at_random(given, generator), top) for _ in range(draws)
    ]
    return Separability(
        recall=torch.stack([f.recall for f in found]).mean(0),
        precision=torch.stack([f.precision for f in found]).mean(0),
        margin=torch.stack([f.margin for f in found]).mean(0),
    )


# Who is nearer, on which scale, and the distance that belongs to a nearness.
Nearness = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]


def _euclidean(picked: SelectedTokens) -> Nearness:
    square_xQ = picked.length_xQ.square()
    return picked.closeness_xQK, square_xQ, lambda near: root(square_xQ - near)


def _cosine(picked: SelectedTokens) -> Nearness:
    """The follow-up adds 1e-12 below; among equal tokens that would rank by weight.

    Only a token without a direction needs care: its distance is 1.
    """
    along_xQK = picked.given.w_xQK * picked.onto_xQK
    size_xQK = picked.given.y_square_xQK.sqrt() * picked.length_xQ[..., None]
    near_xQK = along_xQK / size_xQK.masked_fill(size_xQK == 0, torch.inf)
    return near_xQK, torch.ones_like(picked.mass_xQ), lambda near: 1 - near


_NEARNESS: dict[str, Callable[[SelectedTokens], Nearness]] = {
    "euclidean": _euclidean,
    "cosine": _cosine,
}
