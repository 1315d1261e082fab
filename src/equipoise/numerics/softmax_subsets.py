"""The softmax-Jacobian norms that are maxima over subsets of keys.

Axes, in this file:  x any leading axes · K key, from large to small · S subset.

For x = ±1, + on S, with mass a = p(S) and b = Σ_S p²,

    ‖Jx‖₁ = 4a(1−a)                  maximal: θ(p), see ``equipoise.numerics.balance``,
    ‖Jx‖₂² = 4(b(1−2a) + a²Σp²)      maximal: ‖J‖²_{∞→2} = ‖J‖²_{2→1}.

The second is exact here when p₍₁₎ ≥ ½ (then S = {top}) and for at most 12 keys (all
subsets are tried). Otherwise it is an interval: below, the best prefix of the sorted
row; above, the same expression for a ≤ ½ with b replaced by its fractional-knapsack
bound, the broken line through the prefixes, on each piece of which it is a parabola.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.numerics.balance import balance
from equipoise.numerics.balance_ladder import outward
from equipoise.numerics.softmax_rows import Rows, taken_apart

_ALL_SUBSETS = 12


class Interval(NamedTuple):
    """A norm per row: attained, not exceeded, and whether the two are one."""

    lower: Tensor
    upper: Tensor
    exact: Tensor


def inf_to_one(p_xK: Tensor) -> Interval:
    """Return ‖J‖_{∞→1} = θ(p) of every row.

    >>> inf_to_one(torch.tensor([0.5, 0.25, 0.25])).upper
    tensor(1.)
    """
    found = balance(p_xK)
    return Interval(found.lower, found.upper, found.exact)


def inf_to_two(p_xK: Tensor) -> Interval:
    """Return ‖J‖_{∞→2} = ‖J‖_{2→1} of every row.

    >>> inf_to_two(torch.tensor([0.5, 0.5, 0.0])).upper
    tensor(0.7071)
    """
    dtype = torch.promote_types(p_xK.dtype, torch.float32)
    rows = taken_apart(p_xK, least=torch.float64)
    p_xK = rows.p_xK.sort(-1, descending=True).values[..., :-1]  # the top left a zero
    lower_x, upper_x = _all(p_xK) if p_xK.shape[-1] <= _ALL_SUBSETS else _bounds(p_xK)
    alone_x, settled = _top_alone(rows), rows.top_x >= 0.5
    lower_x = torch.where(settled, alone_x, lower_x).sqrt()
    upper_x = torch.where(settled, alone_x, upper_x).sqrt()
    return _rounded(lower_x, upper_x, dtype, keys=p_xK.shape[-1])


def _value(a: Tensor, b: Tensor, squares: Tensor) -> Tensor:
    return 4 * (b * (1 - 2 * a) + a.square() * squares)


def _top_alone(rows: Rows) -> Tensor:
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
) -> Interval:
    slack = (4 + keys) * torch.finfo(torch.float64).eps  # running sums lose one a key
    bounds_x2 = torch.stack([lower_x * (1 - slack), upper_x * (1 + slack)], -1)
    lower_x, upper_x = outward(bounds_x2, dtype)
    close_x = upper_x * (2 * slack + 4 * torch.finfo(dtype).eps)
    return Interval(lower_x, upper_x, upper_x - lower_x <= close_x)
