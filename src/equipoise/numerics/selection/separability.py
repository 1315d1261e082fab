"""Can the chosen tokens be told from the rest by their distance to their own sum?

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
from equipoise.numerics.selection.rows import (
    Chosen,
    WeightedTokens,
    chosen,
    ranked_at_random,
    root,
)

Metric = Literal["euclidean", "cosine"]
# Differences of this many ulp of ‖s‖² are ties: rounding must not decide who is nearer.
_TIE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Separability:
    """How well a ball around s holds the chosen tokens and nothing else, per query.

    NaN where a query sees no more than N keys.
    """

    recall: Float[Tensor, "*x Q"]
    """|{i∈I : D_i < ρ_min}|/N, the paper's N_s/N."""
    precision: Float[Tensor, "*x Q"]
    """N/(N + |{j∉I : D_j ≤ ρ_max}|)."""
    margin: Float[Tensor, "*x Q"]
    """ρ_min − ρ_max; positive when one ball separates perfectly."""

    @property
    def f(self) -> Float[Tensor, "*x Q"]:
        """2PR/(P+R), P never 0."""
        return 2 * self.precision * self.recall / (self.precision + self.recall)


def separability(
    given: WeightedTokens, top: int, *, metric: Metric = "euclidean"
) -> Separability:
    """Return recall, precision and margin of the ``top`` first-ranked keys.

    Exact, at O(K·D) per query: D_i is ordered by f_i = 2α_i⟨s, x_i⟩ − α_i²‖x_i‖²,
    which needs one inner product per key and no pair of tokens.

    Example:
        >>> from equipoise.numerics.selection.rows import weighted_tokens
        >>> w = torch.tensor([[0.2, 0.2, 0.2, 0.2, 0.1, 0.1]])
        >>> found = separability(weighted_tokens(w, torch.eye(6)), 4)
        >>> found.recall, found.precision
        (tensor([1.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    return separability_of(chosen(given, top), metric=metric)


def separability_of(picked: Chosen, *, metric: Metric = "euclidean") -> Separability:
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
    metric: Metric = "euclidean",
) -> Separability:
    """Return the means over random rankings, each around its own sum: the control."""
    if draws < 1:
        raise InputError(f"draws {draws}: the control needs at least one ranking")
    found = [
        separability(ranked_at_random(given, generator), top, metric=metric)
        for _ in range(draws)
    ]
    return Separability(
        recall=torch.stack([f.recall for f in found]).mean(0),
        precision=torch.stack([f.precision for f in found]).mean(0),
        margin=torch.stack([f.margin for f in found]).mean(0),
    )


# Who is nearer, on which scale, and the distance that belongs to a nearness.
Nearness = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]


def _euclidean(picked: Chosen) -> Nearness:
    square_xQ = picked.length_xQ.square()
    return picked.closeness_xQK, square_xQ, lambda near: root(square_xQ - near)


def _cosine(picked: Chosen) -> Nearness:
    """The follow-up adds 1e-12 below; among equal tokens that would rank by weight.

    Only a token without a direction needs care: its distance is 1.
    """
    along_xQK = picked.given.w_xQK * picked.onto_xQK
    size_xQK = picked.given.y_square_xQK.sqrt() * picked.length_xQ[..., None]
    near_xQK = along_xQK / size_xQK.masked_fill(size_xQK == 0, torch.inf)
    return near_xQK, torch.ones_like(picked.mass_xQ), lambda near: 1 - near


_NEARNESS: dict[str, Callable[[Chosen], Nearness]] = {
    "euclidean": _euclidean,
    "cosine": _cosine,
}
