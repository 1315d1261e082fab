"""Largest eigenvalues from above, without an eigensolver: traces of high powers.

Axes, in this file:  A, B sides of a small matrix · x any leading axes.

For eigenvalues λ ≥ 0 and k = 2^s, λ_max ≤ (Σλ^k)^{1/k} = tr(M^k)^{1/k} ≤ λ_max·A^{1/k}.

Power iteration approaches from below and certifies nothing; this approaches from above,
costs s small matrix products for a whole stack at once, and never fails to converge.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def moment_root(
    m_xAA: Float[Tensor, "*x A A"], *, squarings: int = 8
) -> Float[Tensor, "*x"]:
    """Return an upper bound on λ_max of matrices whose eigenvalues are non-negative.

    Assumes real non-negative eigenvalues (a Gram matrix, or a product of two). The
    answer is at most A^(1/2^squarings) too large: 1.9 % for A = 128 and 8 squarings.

    Example:
        >>> round(float(moment_root(torch.diag(torch.tensor([3.0, 1.0, 0.0])))), 4)
        3.0
    """
    # tr(M^k) would overflow: keep M^k at trace one, and its scale as a logarithm.
    t_x = _trace(m_xAA)
    m_xAA, log_x = m_xAA / _safe(t_x), _safe(t_x)[..., 0, 0].log()
    for _ in range(squarings):
        m_xAA = m_xAA @ m_xAA
        s_x = _safe(_trace(m_xAA))
        m_xAA, log_x = m_xAA / s_x, 2 * log_x + s_x[..., 0, 0].log()
    root_x = (log_x / 2**squarings).exp()
    return torch.where(t_x[..., 0, 0] == 0, torch.zeros_like(root_x), root_x)


def moment_norm(
    m_xAB: Float[Tensor, "*x A B"], *, squarings: int = 8
) -> Float[Tensor, "*x"]:
    """Return an upper bound on ‖m‖₂, at most min(A, B)^(1/2^(squarings+1)) too large.

    Example:
        >>> round(float(moment_norm(torch.tensor([[3.0, 0.0, 4.0]]))), 4)
        5.0
    """
    if m_xAB.shape[-2] > m_xAB.shape[-1]:
        m_xAB = m_xAB.mT
    return moment_root(m_xAB @ m_xAB.mT, squarings=squarings).sqrt()


def _trace(m_xAA: Tensor) -> Tensor:
    # Rounding can leave a trace of −1e-17 where the matrix is zero.
    return m_xAA.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)[..., None, None]


def _safe(t_x: Tensor) -> Tensor:
    return torch.where(t_x == 0, torch.ones_like(t_x), t_x)
