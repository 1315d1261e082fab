"""Every operator norm of the softmax Jacobian J(p) = (diag p − ppᵀ)/T, row by row.

Axes, in this file:  x any leading axes · K key.

| norm              | of a row                   | at most, per 1/T | attained at      |
|-------------------|----------------------------|------------------|------------------|
| entry (1→∞)       | p₍₁₎(1−p₍₁₎)               | ¼                | any p with a ½   |
| row ℓ2 (2→∞, 1→2) | maxᵢ ‖row i‖₂              | √2/4             | (½, ½)           |
| row ℓ1 (∞→∞, 1→1) | 2p₍₁₎(1−p₍₁₎)              | ½                | any p with a ½   |
| spectral (2→2)    | secular root               | ½                | (½, ½)           |
| Frobenius         | √Σ ‖row i‖₂²               | ½                | (½, ½)           |
| ∞→2, 2→1          | maximum over subsets       | √2/2             | (½, ½)           |
| ∞→1               | θ(p), maximum over subsets | 1                | a balanced split |
| nuclear           | 1 − Σp²                    | 1 − 1/K          | uniform          |
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.softmax_rows import Rows, taken_apart
from equipoise.numerics.softmax_secular import secular_root, secular_vector
from equipoise.numerics.softmax_subsets import Interval, inf_to_one, inf_to_two

# Suprema over all rows of two or more keys, per 1/T; nuclear: over any number of keys.
SUPREMA = {
    "entry": 0.25,
    "row": math.sqrt(2) / 4,
    "row_sum": 0.5,
    "spectral": 0.5,
    "frobenius": 0.5,
    "inf_to_two": math.sqrt(2) / 2,
    "inf_to_one": 1.0,
    "nuclear": 1.0,
}


class Bracket(NamedTuple):
    """Bounds that need only the two largest entries of a row."""

    lower: Tensor
    upper: Tensor


class Maximiser(NamedTuple):
    """The direction a row reacts to most, and by how much."""

    norm: Tensor
    direction: Tensor
    """Unit vector over keys, and the response is along it; NaN for a one-hot row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JacobianNorms:
    """All norms of the table. The two maxima over subsets are intervals."""

    entry: Tensor
    row: Tensor
    row_sum: Tensor
    spectral: Tensor
    frobenius: Tensor
    inf_to_two: Interval
    inf_to_one: Interval
    nuclear: Tensor


def softmax_jacobian_norm(p_xK: Float[Tensor, "*x K"]) -> Float[Tensor, "*x"]:
    """Return ‖diag(p) − ppᵀ‖₂ of every row, accurate to a few ulp even when saturated.

    Divide by T for the Jacobian of softmax(z/T). Rows are read in at least float32 and
    renormalised; one that is not a probability row gives NaN.

    Example:
        >>> softmax_jacobian_norm(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
        tensor([0.5000, 0.0000])
    """
    return secular_root(taken_apart(p_xK))


def softmax_jacobian_bracket(p_xK: Float[Tensor, "*x K"]) -> Bracket:
    """Return max(p₍₂₎, p₍₁₎r) ≤ ‖J‖₂ ≤ min(p₍₁₎, 2p₍₁₎r), r = 1 − p₍₁₎: within 2×.

    Below: interlacing, and the largest entry. Above: interlacing, and Gershgorin.

    Example:
        >>> softmax_jacobian_bracket(torch.tensor([0.5, 0.25, 0.25])).upper
        tensor(0.5000)
    """
    rows = taken_apart(p_xK)
    entry_x = rows.top_x * rows.away_x
    return Bracket(
        torch.maximum(rows.second_x, entry_x), torch.minimum(rows.top_x, 2 * entry_x)
    )


def softmax_maximiser(p_xK: Float[Tensor, "*x K"]) -> Maximiser:
    """Return ‖J‖₂ and the unit change of scores that attains it.

    Example:
        >>> softmax_maximiser(torch.tensor([0.5, 0.5])).direction.abs()
        tensor([0.7071, 0.7071])
    """
    rows = taken_apart(p_xK)
    v_xK = secular_vector(rows)
    v_xK = v_xK[..., 1:].scatter(-1, rows.at_x1, v_xK[..., :1])
    return Maximiser(secular_root(rows), v_xK)


def softmax_jacobian_norms(
    p_xK: Float[Tensor, "*x K"], *, temperature: float = 1.0
) -> JacobianNorms:
    """Return every norm of the table, of the Jacobian of softmax(z/temperature).

    Example:
        >>> softmax_jacobian_norms(torch.tensor([0.5, 0.5]), temperature=0.5).entry
        tensor(0.5000)
    """
    if not temperature > 0:
        raise InputError(f"temperature {temperature}: give a positive number")
    rows = taken_apart(p_xK)
    entry_x, lengths_xK = rows.top_x * rows.away_x, _row_lengths(rows)
    return JacobianNorms(
        entry=entry_x / temperature,
        row=lengths_xK.amax(-1) / temperature,
        row_sum=2 * entry_x / temperature,
        spectral=secular_root(rows) / temperature,
        frobenius=lengths_xK.norm(dim=-1) / temperature,
        inf_to_two=_divided(inf_to_two(p_xK), temperature),
        inf_to_one=_divided(inf_to_one(p_xK), temperature),
        nuclear=(rows.p_xK * rows.complement_xK).sum(-1) / temperature,
    )


def _row_lengths(rows: Rows) -> Tensor:
    """Return ‖row i of J‖₂ = pᵢ√((1−pᵢ)² + Σ_{j≠i} pⱼ²), the largest key first."""
    squares_xK = rows.rest_xK.square()
    rest_x1 = squares_xK.sum(-1, keepdim=True)
    others_xK = rows.top_x[..., None].square() + (rest_x1 - squares_xK)
    others_xK = torch.cat([rest_x1, others_xK], -1)
    return rows.p_xK * (rows.complement_xK.square() + others_xK).sqrt()


def _divided(found: Interval, temperature: float) -> Interval:
    return Interval(found.lower / temperature, found.upper / temperature, found.exact)
