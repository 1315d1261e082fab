"""Operator norms of the softmax Jacobian J(p) = (diag p − ppᵀ)/T, all of them, by row.

Axes, in this file:  x any leading axes · K key · S subset of keys.

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

The largest eigenvalue of diag(p) − ppᵀ has relative accuracy. With p₍₁₎ ≥ p₍₂₎ ≥ … and
r = Σ_{i≥2} p₍ᵢ₎ it is the one root λ between p₍₂₎ and p₍₁₎ of

    Σ_{i≥2} p₍ᵢ₎²/(λ − p₍ᵢ₎) = (λ − p₍₁₎r)/(p₍₁₎ − λ).

The usual form Σ pᵢ/(pᵢ − λ) = 0 has 1 − p₍₁₎ hidden in it, and reads noise on saturated
rows. Here every sum has terms of one sign and everything is in units of p₍₂₎.

Maxima over subsets: for x = ±1, + on S, with mass a = p(S) and b = Σ_S p²,

    ‖Jx‖₁ = 4a(1−a)                  maximal: θ(p), see ``numerics.rows.balance``,
    ‖Jx‖₂² = 4(b(1−2a) + a²Σp²)      maximal: ‖J‖²_{∞→2} = ‖J‖²_{2→1}.

The second is exact here when p₍₁₎ ≥ ½ (then S = {top}) and for at most 12 keys (all
subsets are tried). Otherwise it is an interval: below, the best prefix of the sorted
row; above, the same expression for a ≤ ½ with b replaced by its fractional-knapsack
bound, the broken line through the prefixes, on each piece of which it is a parabola.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.rows.balance import MASS_TOLERANCE, checked, intervals
from equipoise.numerics.rows.torch_rows import outward


class SplitRows(NamedTuple):
    """Rows as their largest entry and the rest, normalised; NaN where unreadable."""

    top_x: Tensor
    """p₍₁₎"""
    away_x: Tensor
    """1 − p₍₁₎, summed and never subtracted: 1 − 0.99999999 is 0 in float32."""
    rest_xK: Tensor
    """p with one largest entry set to 0."""
    at_x1: Tensor
    """Where that entry was."""

    @property
    def second_x(self) -> Tensor:
        return self.rest_xK.amax(-1)

    @property
    def p_xK(self) -> Tensor:
        """The whole row again, its largest entry first."""
        return torch.cat([self.top_x[..., None], self.rest_xK], -1)

    @property
    def complement_xK(self) -> Tensor:
        """1 − p, in the order of ``p_xK``."""
        others_xK = self.top_x[..., None] + (self.away_x[..., None] - self.rest_xK)
        return torch.cat([self.away_x[..., None], others_xK], -1)


def split_rows(p_xK: Tensor, *, least: torch.dtype = torch.float32) -> SplitRows:
    """Return the rows in at least the dtype ``least``; NaN if not probabilities.

    Negative entries, NaN, or a sum off 1 by more than ``MASS_TOLERANCE``: an
    instrument must not turn a broken row into a plausible number.
    """
    given_xK = checked(p_xK)
    p_xK = given_xK.to(torch.promote_types(given_xK.dtype, least))
    top_x1, at_x1 = p_xK.max(-1, keepdim=True)
    rest_xK = p_xK.scatter(-1, at_x1, 0.0)
    total_x1 = top_x1 + rest_xK.sum(-1, keepdim=True)
    off_x1 = (total_x1 - 1).abs()
    readable = (off_x1 <= MASS_TOLERANCE) & (p_xK >= 0).all(-1, keepdim=True)
    total_x1 = torch.where(readable, total_x1, torch.nan)
    rest_xK = rest_xK / total_x1
    return SplitRows((top_x1 / total_x1)[..., 0], rest_xK.sum(-1), rest_xK, at_x1)


# Quadratic, from above: 4 passes reach float64 on every row tried, the rest is margin.
_PASSES = 6


def secular_root(rows: SplitRows) -> Tensor:
    """Return λ of every row; 0 for a one-hot row, p₍₁₎ when the two largest tie."""
    second_x = rows.second_x
    # A one-hot row has no second key: its unit is 1 and its λ is 0.
    return torch.where(second_x == 0, 0.0, second_x + _offset(rows) * _unit(rows))


def secular_vector(rows: SplitRows) -> Tensor:
    """Return the unit eigenvector, the largest key first; NaN for a one-hot row.

    v ∝ p/(λ − p) off the top; v ⟂ 1 gives the top, where λ − p may have cancelled.
    """
    unit_x1 = _unit(rows)[..., None]
    P_xK = rows.rest_xK / unit_x1
    v_xK = P_xK / (_positive(_offset(rows))[..., None] + (1 - P_xK))
    v_xK = torch.cat([-v_xK.sum(-1, keepdim=True), v_xK], -1)
    length_x1: Tensor = v_xK.norm(dim=-1, keepdim=True)
    return v_xK / length_x1


def _unit(rows: SplitRows) -> Tensor:
    return torch.where(rows.second_x == 0, 1.0, rows.second_x)


def _positive(x_x: Tensor) -> Tensor:
    return x_x.clamp(min=torch.finfo(x_x.dtype).eps ** 2)  # a tie is 0/0 otherwise


def _offset(rows: SplitRows) -> Tensor:
    """Return x = (λ − p₍₂₎)/p₍₂₎."""
    unit_x = _unit(rows)
    P_xK = rows.rest_xK / unit_x[..., None]
    shift_x = 1 - rows.top_x * (rows.away_x / unit_x)
    gap_x = rows.top_x - rows.second_x
    highest_x = torch.minimum(rows.top_x, 2 * rows.top_x * rows.away_x)
    x_x = (highest_x - rows.second_x) / unit_x
    for _ in range(_PASSES):
        x_x = _pass(x_x, P_xK, unit_x=unit_x, gap_x=gap_x, shift_x=shift_x)
    return x_x


def _pass(
    x_x: Tensor, P_xK: Tensor, *, unit_x: Tensor, gap_x: Tensor, shift_x: Tensor
) -> Tensor:
    """Return a better x.

    The sum is replaced by a + b/x of the same value and slope (Bunch, Nielsen and
    Sorensen, 1978), which leaves (1+a)x² + (shift + b − a·gap)x − b·gap = 0.
    """
    x_x, D_xK = _positive(x_x), 1 - P_xK
    share_xK = P_xK / (x_x[..., None] + D_xK)
    a_x = (share_xK.square() * D_xK).sum(-1)
    b_x = (share_xK * x_x[..., None]).square().sum(-1)
    half_x = (shift_x + unit_x * b_x - a_x * gap_x) / 2
    lead_x, last_x = 1 + unit_x * a_x, b_x * gap_x
    root_x = (half_x.square() + lead_x * last_x).sqrt()
    # Whichever form adds numbers of one sign.
    return torch.where(
        half_x > 0, last_x / (half_x + root_x), (root_x - half_x) / lead_x
    )


_ALL_SUBSETS = 12


class NormInterval(NamedTuple):
    """A norm per row: attained, not exceeded, and whether the two are one."""

    lower: Tensor
    upper: Tensor
    exact: Tensor


def inf_to_one(p_xK: Tensor) -> NormInterval:
    """Return ‖J‖_{∞→1} = θ(p) of every row.

    >>> inf_to_one(torch.tensor([0.5, 0.25, 0.25])).upper
    tensor(1.)
    """
    found = intervals(p_xK, witness=False, effort=1.0)
    return NormInterval(found.lower, found.upper, found.exact)


def inf_to_two(p_xK: Tensor) -> NormInterval:
    """Return ‖J‖_{∞→2} = ‖J‖_{2→1} of every row.

    >>> inf_to_two(torch.tensor([0.5, 0.5, 0.0])).upper
    tensor(0.7071)
    """
    dtype = torch.promote_types(p_xK.dtype, torch.float32)
    rows = split_rows(p_xK, least=torch.float64)
    p_xK = rows.p_xK.sort(-1, descending=True).values[..., :-1]  # the top left a zero
    lower_x, upper_x = _all(p_xK) if p_xK.shape[-1] <= _ALL_SUBSETS else _bounds(p_xK)
    alone_x, settled = _top_alone(rows), rows.top_x >= 0.5
    lower_x = torch.where(settled, alone_x, lower_x).sqrt()
    upper_x = torch.where(settled, alone_x, upper_x).sqrt()
    return _rounded(lower_x, upper_x, dtype, keys=p_xK.shape[-1])


def _value(a: Tensor, b: Tensor, squares: Tensor) -> Tensor:
    return 4 * (b * (1 - 2 * a) + a.square() * squares)


def _top_alone(rows: SplitRows) -> Tensor:
    """Return 4(p₁²r² + p₁²Σ_rest p²): what {top} attains, without 1 − p₁."""
    rest_x = rows.rest_xK.square().sum(-1)
    return 4 * rows.top_x.square() * (rows.away_x.square() + rest_x)


def _all(p_xK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum over all subsets; the largest key may stay inside."""
    K = p_xK.shape[-1]
    number_S = torch.arange(2 ** (K - 1), device=p_xK.device)
    bits_SK = (number_S[:, None] >> torch.arange(K, device=p_xK.device)) & 1
    bits_SK = bits_SK.flip(-1).bool()  # bit K−1, never set, is the largest key
    inside_KS = (~bits_SK).to(p_xK.dtype).mT
    squares_x1 = p_xK.square().sum(-1, keepdim=True)
    best_x = _value(p_xK @ inside_KS, p_xK.square() @ inside_KS, squares_x1).amax(-1)
    return best_x, best_x


def _bounds(p_xK: Tensor) -> tuple[Tensor, Tensor]:
    squares_x1 = p_xK.square().sum(-1, keepdim=True)
    a_xK, b_xK = p_xK.cumsum(-1), p_xK.square().cumsum(-1)
    lower_x = _value(a_xK, b_xK, squares_x1).amax(-1)
    # On one piece b = b₀ + p(a − a₀): a parabola in a, at its ends or at its vertex.
    from_xK, offset_xK = a_xK - p_xK, (b_xK - p_xK.square()) - p_xK * (a_xK - p_xK)
    to_xK = a_xK.clamp(max=0.5)
    bend_xK = squares_x1 - 2 * p_xK
    vertex_xK = (p_xK - 2 * offset_xK) / torch.where(bend_xK < 0, -2 * bend_xK, 1.0)
    vertex_xK = torch.where(bend_xK < 0, vertex_xK, 0.0)
    upper_x = lower_x
    for at_xK in (from_xK, to_xK, torch.minimum(vertex_xK.clamp(min=from_xK), to_xK)):
        line_xK = offset_xK + p_xK * at_xK
        value_xK = _value(at_xK, line_xK, squares_x1)
        value_xK = value_xK.masked_fill(from_xK > 0.5, 0.0)
        upper_x = torch.maximum(upper_x, value_xK.amax(-1))
    return lower_x, upper_x


def _rounded(
    lower_x: Tensor, upper_x: Tensor, dtype: torch.dtype, *, keys: int
) -> NormInterval:
    slack = (4 + keys) * torch.finfo(torch.float64).eps  # running sums lose one a key
    bounds_x2 = torch.stack([lower_x * (1 - slack), upper_x * (1 + slack)], -1)
    lower_x, upper_x = outward(bounds_x2, dtype)
    close_x = upper_x * (2 * slack + 4 * torch.finfo(dtype).eps)
    return NormInterval(lower_x, upper_x, upper_x - lower_x <= close_x)


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
    inf_to_two: NormInterval
    inf_to_one: NormInterval
    nuclear: Tensor


def softmax_jacobian_norm(p_xK: Float[Tensor, "*x K"]) -> Float[Tensor, "*x"]:
    """Return ‖diag(p) − ppᵀ‖₂ of every row, accurate to a few ulp even when saturated.

    Divide by T for the Jacobian of softmax(z/T). Rows are read in at least float32 and
    renormalised; one that is not a probability row gives NaN.

    Example:
        >>> softmax_jacobian_norm(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
        tensor([0.5000, 0.0000])
    """
    return secular_root(split_rows(p_xK))


def softmax_jacobian_bracket(p_xK: Float[Tensor, "*x K"]) -> Bracket:
    """Return max(p₍₂₎, p₍₁₎r) ≤ ‖J‖₂ ≤ min(p₍₁₎, 2p₍₁₎r), r = 1 − p₍₁₎: within 2×.

    Below: interlacing, and the largest entry. Above: interlacing, and Gershgorin.

    Example:
        >>> softmax_jacobian_bracket(torch.tensor([0.5, 0.25, 0.25])).upper
        tensor(0.5000)
    """
    rows = split_rows(p_xK)
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
    rows = split_rows(p_xK)
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
    rows = split_rows(p_xK)
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


def _row_lengths(rows: SplitRows) -> Tensor:
    """Return ‖row i of J‖₂ = pᵢ√((1−pᵢ)² + Σ_{j≠i} pⱼ²), the largest key first."""
    squares_xK = rows.rest_xK.square()
    rest_x1 = squares_xK.sum(-1, keepdim=True)
    others_xK = rows.top_x[..., None].square() + (rest_x1 - squares_xK)
    others_xK = torch.cat([rest_x1, others_xK], -1)
    return rows.p_xK * (rows.complement_xK.square() + others_xK).sqrt()


def _divided(found: NormInterval, temperature: float) -> NormInterval:
    return NormInterval(
        found.lower / temperature, found.upper / temperature, found.exact
    )
