"""Ours, the local constant itself: a bracket that closes.

Axes, in this file:  S start · K key · D, C model width (in, out).

In block-∞ norm the constant of query i is  L = max over unit y of Σ_j ‖J_j y‖, with J_j
the block of key j. Any y gives a lower bound. Any weights w_j > 0 with Σ w_j = 1 give

    L² ≤ max over y of Σ_j ‖J_j y‖²/w_j = λ_max(Σ_j J_jᵀJ_j / w_j),

by Cauchy–Schwarz. With w_j ∝ ‖J_j y‖ at the best y the two agree whenever that y is the
top eigenvector: then L is known exactly. Otherwise w is improved: the least upper bound
is a concave maximum over mixtures of directions, which conditional gradients climb.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.theory.lipschitz.bound import Bound
from equipoise.theory.lipschitz.forward import Attended, attend
from equipoise.theory.lipschitz.heads import Heads
from equipoise.theory.lipschitz.joint import row_blocks

_STARTS = 4
_ALTERNATIONS = 30
# Blocks the best direction does not see still need a weight; it costs half of this.
_FLOOR = 1e-4


class Bracket(NamedTuple):
    """Per query: a value some change of the input attains, and one none exceeds."""

    lower: Tensor
    upper: Tensor


def dual_bound(
    heads: Heads,
    x_KD: Float[Tensor, "K D"],
    *,
    mask: Tensor | None = None,
    steps: int = 8,
) -> Bound:
    """Return the largest upper end: within a few per cent of the local constant.

    Cost: about ``steps`` × keys × D³ per query. For small layers, or few queries.
    """
    found = dual_rows(attend(heads, x_KD, mask=mask), steps=steps)
    lower, upper = float(found.lower.max()), float(found.upper.max())
    note = f"dual certificate; {lower:.6g} is attained"
    return Bound(value=upper, scope="local", kind="first order", note=note)


def dual_rows(attended: Attended, *, steps: int = 8) -> Bracket:
    """Return the bracket of every query of this attention."""
    rows = (torch.cat(list(row_blocks(attended, i))) for i in range(len(attended.at_Q)))
    brackets = [block_inf_norm(j_KDC, steps=steps) for j_KDC in rows]
    return Bracket(*(torch.stack(ends) for ends in zip(*brackets, strict=True)))


def block_inf_norm(j_KDC: Float[Tensor, "K D C"], *, steps: int = 8) -> Bracket:
    """Return a bracket of max ‖Σ_j z_j J_j‖₂ over ‖z_j‖₂ ≤ 1, for one row of blocks.

    Example:
        >>> found = block_inf_norm(torch.stack([torch.eye(2), 2 * torch.eye(2)]))
        >>> round(float(found.lower), 3), round(float(found.upper), 3)
        (3.0, 3.0)
    """
    size_K = j_KDC.square().sum((-2, -1)).sqrt()
    if not (size_K.sum() > 0 and size_K.isfinite().all()):
        broken = size_K.sum() * 0  # zero for a row that depends on nothing, else NaN
        return Bracket(broken, broken)
    j_KDC, size_K = j_KDC[size_K > 0], size_K[size_K > 0]
    lower, reach_K = _alternated(j_KDC)
    square_K, upper = reach_K.square(), torch.full_like(lower, torch.inf)
    for _ in range(steps):
        w_K = square_K.sqrt() + _FLOOR * square_K.sqrt().sum() * size_K / size_K.sum()
        top, y_C = _leading(j_KDC, w_K / w_K.sum())
        upper = torch.minimum(upper, top.sqrt())
        seen_K = (j_KDC @ y_C).square().sum(-1)
        lower = torch.maximum(lower, seen_K.sqrt().sum())
        if upper <= lower * (1 + _FLOOR):
            break
        square_K = _climbed(square_K, seen_K)
    return Bracket(torch.minimum(lower, upper), upper)


def _alternated(j_KDC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best Σ_j ‖J_j y‖ found, and its terms; each step only increases it."""
    gram_CC = torch.einsum("KDB,KDC->BC", j_KDC, j_KDC)
    y_SC = torch.linalg.eigh(gram_CC).eigenvectors.mT[-_STARTS:]
    # Blocks that share no direction make each eigenvector a saddle; their sum is not.
    y_SC = torch.cat([y_SC, y_SC.sum(0, keepdim=True)])
    for _ in range(_ALTERNATIONS):
        z_SKD = _unit(torch.einsum("KDC,SC->SKD", j_KDC, y_SC))
        y_SC = _unit(torch.einsum("SKD,KDC->SC", z_SKD, j_KDC))
    reach_SK = torch.einsum("KDC,SC->SKD", j_KDC, y_SC).square().sum(-1).sqrt()
    best = reach_SK.sum(-1).argmax()
    return reach_SK[best].sum(), reach_SK[best]


def _unit(u_xD: Tensor) -> Tensor:
    """Return u/‖u‖, and zero for zero."""
    tiny = torch.finfo(u_xD.dtype).tiny
    return torch.nn.functional.normalize(u_xD, dim=-1, eps=tiny)


def _leading(j_KDC: Tensor, w_K: Tensor) -> tuple[Tensor, Tensor]:
    m_CC = torch.einsum("KDB,KDC->BC", j_KDC / w_K[:, None, None], j_KDC)
    values, vectors = torch.linalg.eigh(m_CC)
    return values[-1].clamp_min(0), vectors[:, -1]


def _climbed(square_K: Tensor, seen_K: Tensor) -> Tensor:
    """Return the mixture of old and new directions with the largest Σ_j √(…_j)."""
    share_S = torch.linspace(0.0, 1.0, 33).to(square_K)[1:, None]
    mixed_SK = square_K + share_S * (seen_K - square_K)
    return mixed_SK[mixed_SK.clamp_min(0).sqrt().sum(-1).argmax()].clamp_min(0)
