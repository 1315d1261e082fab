"""How far the chosen tokens' sum lies from all the others: d̃ of Mudarisov et al.

Axes, in this file:  x any leading axes · Q query · K key · D width. n visible keys,
N chosen, α weights, y_i = α_i x_i, s = Σ_{i∈I} y_i, ᾱ = Σ_{i∈I} α_i, c = s/ᾱ.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.selection.rows import Chosen, WeightedTokens, chosen, root


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """d̃ = Σ_{i∉I} ‖s − y_i‖ of each query, between its bounds, and what chance gives.

    NaN where a query sees no more than N keys.
    """

    value: Float[Tensor, "*x Q"]
    upper: Float[Tensor, "*x Q"]
    """Ours: Σ|α_i|‖x_i − c‖ + ‖c‖ Σ|ᾱ − α_i| over i∉I; any set, any weights."""
    lower: Float[Tensor, "*x Q"]
    """Ours: max(0, (n − N)‖s‖ − Σ_{i∉I} |α_i|‖x_i‖)."""
    expected_lower: Float[Tensor, "*x Q"]
    """E[d̃] over random sets is at least this, the main term of Theorem 1 (2)."""
    expected_upper: Float[Tensor, "*x Q"]
    per_token: Float[Tensor, "*x Q"]
    """d̃/(n − N): comparable across lengths and sizes."""

    @property
    def lift_lower(self) -> Float[Tensor, "*x Q"]:
        """d̃/E[d̃] is at least this: how much further than chance the choice stands."""
        return self.value / self.expected_upper

    @property
    def lift_upper(self) -> Float[Tensor, "*x Q"]:
        """d̃/E[d̃] is at most this."""
        return self.value / self.expected_lower


def distance(given: WeightedTokens, top: int) -> Distance:
    """Return d̃ of the ``top`` first-ranked keys, its bounds and its expectation.

    Example:
        >>> from equipoise.numerics.selection.rows import weighted_tokens
        >>> flat, same = torch.full((1, 8), 1 / 8), torch.ones(8, 1)
        >>> distance(weighted_tokens(flat, same), 4).value  # L/4 − ½
        tensor([1.5000], dtype=torch.float64)
    """
    return distance_of(chosen(given, top))


def distance_of(picked: Chosen) -> Distance:
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
    )


def _bounds(picked: Chosen, rest_xQK: Tensor) -> tuple[Tensor, Tensor]:
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
    lengths_xQ = (given.w_xQK.abs() * given.square_x1K.sqrt()).sum(-1)
    upper_xQ = torch.minimum(upper_xQ, left_xQ * (top + 1) * lengths_xQ)
    return given.reading(lower_xQ, top), given.reading(upper_xQ, top)


def _per_pair(n_xQ1: Tensor, top: int) -> Tensor:
    """Return N(n−1−N)/((n−1)(n−2)); with two keys there is nothing to vary."""
    pairs = (n_xQ1 - 1) * (n_xQ1 - 2)
    return torch.where(pairs > 0, top * (n_xQ1 - 1 - top) / pairs, 0.0)


def published_bound(picked: Chosen) -> Float[Tensor, "*x Q"]:
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
