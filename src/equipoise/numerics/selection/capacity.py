"""How many tokens can be told apart by distance in d dimensions: laws and bounds.

Axes, in this file:  x any leading axes · N chosen key. Tokens independent and uniform
on a sphere of radius M, weights independent of them (the paper's Assumption 1).
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError

_EULER_TERM = 1.1544  # 2γ, of the expected maximum of n normals


class RecallBounds(NamedTuple):
    """Bounds of E[N_s]/N at a fixed radius."""

    lower: Float[Tensor, "*x"]
    upper: Float[Tensor, "*x"]


def capacity(width: int, visible: int, *, ratio: float = 1.0, chosen: int = 1) -> float:
    """Return N* ≈ d(a²+b²)²/(8a²b² ln(n−N)), near which separability breaks.

    A law for orders of magnitude, not a bound: chosen tokens weigh a each, the others
    b, ``ratio`` = a/b. Measured recall at N* lies between .5 and .85.

    Example:
        >>> round(capacity(64, 1024), 1), round(capacity(768, 1024), 1)
        (4.6, 55.4)
    """
    _check(width, visible, ratio, chosen)
    spread = (ratio**2 + 1) ** 2 / (8 * ratio**2)
    return width * spread / math.log(visible - chosen)


def capacity_at(
    width: int, visible: int, recall: float, *, ratio: float = 1.0, chosen: int = 1
) -> float:
    """Return the N at which the recall of flat weights has fallen to a given level.

    N_q ≈ d(a²+b²)²/(4(z_q a² + ab·e_{n−N})²), z_q the normal quantile and e_n the
    expected largest of n normals. Sharper than ``capacity``, and still a law.

    Example:
        >>> round(capacity_at(768, 1024, 0.8), 1)
        45.2
    """
    _check(width, visible, ratio, chosen)
    if not 0 < recall < 1:
        raise InputError(f"recall {recall}: give a number between 0 and 1")
    t = math.sqrt(2 * math.log(visible - chosen))
    largest = t - (math.log(math.log(visible - chosen)) + math.log(4 * math.pi)) / (
        2 * t
    )
    largest += _EULER_TERM / (2 * t)
    reach = NormalDist().inv_cdf(recall) * ratio**2 + ratio * largest
    return width * (ratio**2 + 1) ** 2 / (4 * reach**2) if reach > 0 else math.inf


def sphere_recall(
    weights: Float[Tensor, "*x N"], radius: Tensor | float, *, width: int
) -> RecallBounds:
    """Return our bounds of E[N_s]/N for tokens uniform on the unit sphere.

    X_i = ‖Σ_{j≠i} α_j x_j‖ has E X_i² = σ_i² = Σ_{j≠i} α_j² and Var X_i² ≤ 2σ_i⁴/d, so
    by Chebyshev P(X_i ≤ r) ≥ 1 − 2/(d(ρ²−1)²) for ρ = r/σ_i > 1, and ≤ 2/(d(1−ρ²)²)
    below. For tokens of length M divide the radius by M.

    Example:
        >>> sphere_recall(torch.full((8,), 0.1), 0.5, width=64).lower
        tensor(0.9953, dtype=torch.float64)
    """
    if width < 1:
        raise InputError(f"width {width}: give the dimension of the tokens")
    w_xN = weights.double()
    spread_xN = _spread_of_others(w_xN)
    r_x1 = torch.as_tensor(radius, dtype=torch.float64, device=w_xN.device)[..., None]
    # σ = 0: the chosen token is alone, and X is 0.
    over_xN = r_x1.square() / spread_xN - 1
    tail_xN = 2 / (width * over_xN.square())
    lower_xN = torch.where(over_xN > 0, 1 - tail_xN, 0.0).clamp(0.0, 1.0)
    upper_xN = torch.where(over_xN < 0, tail_xN, 1.0).clamp(0.0, 1.0)
    alone_xN = (spread_xN == 0).expand_as(lower_xN)
    lower_xN = lower_xN.masked_fill(alone_xN, 1.0)
    return RecallBounds(lower_xN.mean(-1), upper_xN.mean(-1))


def published_sphere_recall(
    weights: Float[Tensor, "*x N"],
    radius: Tensor | float,
    *,
    gap: float,
    clamped: bool = False,
) -> RecallBounds:
    """Return Theorem 2 as rebuilt, for unit tokens at least ``gap`` = δ apart.

    1 − Σξ_i/(rN) ≤ E[N_s]/N ≤ Σexp(−(ξ_i−r)²/2)/N, with ξ_i² = Σα_j² + (1−δ²/2)
    Σ_{j≠k}α_jα_k over the others. The display was not found; the upper bound, so
    rebuilt, is false, ``clamped`` to (ξ_i−r)₊ or not: see ``equipoise.claims``.
    """
    w_xN = weights.double()
    own_xN = _spread_of_others(w_xN)
    mass_xN = w_xN.sum(-1, keepdim=True) - w_xN
    cross_xN = (mass_xN.square() - own_xN) * (1 - gap**2 / 2)
    xi_xN = (own_xN + cross_xN).clamp_min(0.0).sqrt()
    r_x1 = torch.as_tensor(radius, dtype=torch.float64, device=w_xN.device)[..., None]
    lower_x = 1 - (xi_xN / r_x1).mean(-1)
    above_xN = (xi_xN - r_x1).clamp_min(0.0) if clamped else xi_xN - r_x1
    upper_x = (-above_xN.square() / 2).exp().mean(-1)
    return RecallBounds(lower_x, upper_x)


def _spread_of_others(w_xN: Tensor) -> Tensor:
    """Return σ_i² = Σ_{j≠i} α_j², 0 exactly when there is nobody else."""
    others = w_xN.square().sum(-1, keepdim=True) - w_xN.square()
    return others.clamp_min(0.0) if w_xN.shape[-1] > 1 else torch.zeros_like(w_xN)


def _check(width: int, visible: int, ratio: float, chosen: int) -> None:
    if width < 1 or ratio <= 0 or visible - chosen < 2:
        raise InputError(
            f"width {width}, ratio {ratio}, {chosen} of {visible} keys: the law needs "
            "a positive width and ratio and at least two keys left over"
        )
