"""How far a row of attention can move when its logits move by at most r: exactly.

    sup_{‖Δ‖∞ ≤ r} ‖softmax(u + Δ) − p‖₁ = max_S 4m(1−m) sinh r / (m e^r + (1−m) e^−r),

m = p(S). Ours. Proof: ‖q − p‖₁ = 2 max_S (q(S) − p(S)); with S fixed q(S) rises in
every logit of S and falls in every other, so +r on S and −r off S is best. As a
function of m it rises to m* = 1/(1 + e^r), where it is 2 tanh(r/2), then falls. For
r → 0 it is θ(p)·r; a saturated row, whose θ is 0, may still move far.

The best S is one of the two whose masses are nearest to m*, from below and from above.
The search is that of θ: with one key of mass 1 − 2m* beside the row, a bisection of
the whole is a subset of the row of mass m*. Masses are told apart to about 1e-8: from
r = 15 on, where m* is smaller, an interval may stay open.

Axes, in this file:  x leading (batch) axes · K key.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.rows.balance import MASS_TOLERANCE, intervals

# Sums of masses and the formula: a few dozen operations in float64, relative.
_ROUNDING = 1e-12
ROUNDS = 60
"""Searches of one row at most; the interval that is left halves with each."""


@dataclass(frozen=True, slots=True)
class FiniteStep:
    """The largest change of every row, in ℓ1, as a certified interval."""

    lower: Float[Tensor, "*x"]
    """Attained by +r on a subset of keys and −r on the others."""
    upper: Float[Tensor, "*x"]
    """Proven: no logits within r move the row further."""


def finite_step(
    p: Float[Tensor, "*x K"], *, radius: float, effort: float = 1.0
) -> FiniteStep:
    """Return sup ‖softmax(u + Δ) − p‖₁ over ‖Δ‖∞ ≤ radius, for every row.

    Args:
        p: Attention rows; masked keys are exact zeros. Any floating dtype.
        radius: r, how far each logit may move.
        effort: As for ``balance``.

    Returns:
        Bounds in float64. A row that is not one of probabilities reads NaN.

    Example:
        >>> found = finite_step(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), radius=2.0)
        >>> found.upper.round(decimals=4)
        tensor([0.0000, 0.9640], dtype=torch.float64)
        >>> nearly = finite_step(torch.tensor([1 - 1e-4, 1e-4]), radius=5.0)
        >>> round(float(nearly.lower), 3)  # θ is 4e-4
        1.375
    """
    if not (0 < radius < math.inf):
        raise InputError(f"radius must be positive and finite, not {radius}")
    p_NK = p.detach().double().reshape(-1, p.shape[-1])
    broken_N = (p_NK < 0).any(-1) | ~((p_NK.sum(-1) - 1).abs() <= MASS_TOLERANCE)
    # A row of one key stands in for what is not a row: it never moves.
    whole_K = torch.eye(p.shape[-1], dtype=torch.float64, device=p.device)[0]
    p_NK = torch.where(broken_N[:, None], whole_K, p_NK)
    low_N, high_N = _bounds(p_NK / p_NK.sum(-1, keepdim=True), radius, effort)
    nan = low_N.new_full((), math.nan)
    return FiniteStep(
        *(x_N.where(~broken_N, nan).view(p.shape[:-1]) for x_N in (low_N, high_N))
    )


def _bounds(p_NK: Tensor, radius: float, effort: float) -> tuple[Tensor, Tensor]:
    """Return the best mass that was found, moved, and a bound on all masses.

    The mass nearest to m* is the best on its side. On the other side only masses
    nearer than the one that moves as far, c = 1 − v/2 − m, are better: they lie in an
    interval (near, far), whose middle is searched next, until it holds no mass.
    """
    target = 1 / (1 + math.exp(radius)) if radius < 700 else 0.0
    best_N, gap_N = _nearest(p_NK, p_NK.new_full(p_NK.shape[:1], target), effort)
    value_N = moved(best_N, radius=radius)
    side_N = torch.where(best_N <= target, 1.0, -1.0)
    near_N = (target + side_N * gap_N).clamp(0, 1)
    far_N = 1 - value_N / 2 - best_N
    for _ in range(ROUNDS):
        (open_n,) = torch.nonzero(side_N * (far_N - near_N) > 0, as_tuple=True)
        if not len(open_n):
            break
        middle_n = ((near_N + far_N) / 2)[open_n]
        found_n, gap_n = _nearest(p_NK[open_n], middle_n, effort)
        reach_n = moved(found_n, radius=radius)
        value_N[open_n] = torch.maximum(value_N[open_n], reach_n)
        far_N[open_n] = middle_n - side_N[open_n] * gap_n
    left_N = side_N * (far_N - near_N) > 0
    high_N = torch.maximum(value_N, moved(near_N, radius=radius).where(left_N, value_N))
    most = 2 * math.tanh(radius / 2)
    return value_N * (1 - _ROUNDING), (high_N * (1 + _ROUNDING)).clamp_max(most)


def _nearest(p_NK: Tensor, target_N: Tensor, effort: float) -> tuple[Tensor, Tensor]:
    """Return p(S) near a target, and how far every subset's mass is from it at least.

    θ of the row and a companion is 1 − (gap/(1 − t))² for a target t ≤ ½; a larger one
    is reached by the complement.
    """
    over_N = target_N > 0.5
    t_N = torch.where(over_N, 1 - target_N, target_N)
    beside_N1 = (1 - 2 * t_N)[:, None]
    whole_NK = torch.cat([p_NK, beside_N1], -1) / (1 + beside_N1)
    found = intervals(whole_NK, witness=True, effort=effort)
    assert found.witness is not None
    gap_N = (1 - found.upper.double().clamp(0, 1)).sqrt() * (1 - t_N)
    inside_NK, beside_N1 = found.witness[:, :-1], found.witness[:, -1:]
    chosen_NK = torch.where(beside_N1, inside_NK, ~inside_NK) ^ over_N[:, None]
    return (p_NK * chosen_NK).sum(-1), gap_N


def attained_step(p_xK: Tensor, *, radius: float) -> Tensor:
    """Return a change that some Δ within the radius makes: sorted prefixes alone.

    Never more than the truth, and near it in rows of many keys; needs no search and
    does not wait for the device.

    >>> row = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    >>> found = attained_step(row, radius=1.0) / finite_step(row, radius=1.0).upper
    >>> round(float(found), 6)
    1.0
    """
    sorted_xK = (
        p_xK.detach().to(torch.promote_types(p_xK.dtype, torch.float32)).sort(-1)
    )
    rising_xK = sorted_xK.values.cumsum(-1)
    whole_x1 = rising_xK[..., -1:]
    # Both orders: a prefix of the heaviest keys is the rest of one of the lightest.
    masses_x2K = torch.cat([rising_xK, whole_x1 - rising_xK], -1) / whole_x1
    return moved(masses_x2K.clamp(0, 1), radius=radius).amax(-1)


def moved(m_x: Tensor, *, radius: float) -> Tensor:
    """Return 4m(1−m) sinh r / (m e^r + (1−m) e^−r), for r of any size.

    >>> float(moved(torch.tensor(0.5, dtype=torch.float64), radius=800.0))
    1.0
    """
    small = math.exp(-2 * radius)
    rest_x = 1 - m_x
    divisor_x = m_x + rest_x * small
    found_x = 2 * m_x * rest_x * -math.expm1(-2 * radius) / divisor_x
    return found_x.where(divisor_x > 0, torch.zeros_like(found_x))
