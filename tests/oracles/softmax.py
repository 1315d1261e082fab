"""Slow, obvious versions of ``theory.softmax_norms``: float64, dense, autograd.

Nothing here writes diag(p) − ppᵀ: the Jacobian comes from differentiating
``torch.softmax``, norms from dense matrices, and maxima over signs from trying all.
"""

from itertools import product

import mpmath
import torch
from torch import Tensor
from torch.func import jacrev, vmap


def jacobians(z_NK: Tensor) -> Tensor:
    """Return d softmax(z)/dz of each row of scores."""
    J_NKK: Tensor = vmap(jacrev(lambda z_K: torch.softmax(z_K, -1)))(z_NK.double())
    return J_NKK


def over_signs(J_NKK: Tensor, order: int) -> Tensor:
    """Return max over x = ±1 of ‖Jx‖ in the given order: the ∞→order norm."""
    K = J_NKK.shape[-1]
    signs_SK = torch.tensor(list(product([-1.0, 1.0], repeat=K))).double()
    images_NSK = signs_SK @ J_NKK.mT
    worst_N: Tensor = images_NSK.norm(p=order, dim=-1).amax(-1)
    return worst_N


def norms(z_NK: Tensor) -> dict[str, Tensor]:
    """Return every norm of the table, each by its textbook definition."""
    J_NKK = jacobians(z_NK)
    return {
        "entry": J_NKK.abs().amax((-1, -2)),
        "row": J_NKK.norm(dim=-1).amax(-1),
        "row_sum": torch.linalg.matrix_norm(J_NKK, ord=float("inf")),
        "spectral": torch.linalg.matrix_norm(J_NKK, ord=2),
        "frobenius": torch.linalg.matrix_norm(J_NKK, ord="fro"),
        "inf_to_two": over_signs(J_NKK, 2),
        "inf_to_one": over_signs(J_NKK, 1),
        "nuclear": torch.linalg.matrix_norm(J_NKK, ord="nuc"),
    }


def largest_eigenvalue(p: list[float], digits: int = 50) -> mpmath.mpf:
    """Return λ_max of the covariance of a one-hot draw from p, in many digits."""
    with mpmath.workdps(digits):
        total = mpmath.fsum(p)
        q = [mpmath.mpf(x) / total for x in p]
        J = mpmath.matrix(len(q), len(q))
        for i, a in enumerate(q):
            for j, b in enumerate(q):
                J[i, j] = (a if i == j else 0) - a * b
        return max(mpmath.eigsy(J, eigvals_only=True))
