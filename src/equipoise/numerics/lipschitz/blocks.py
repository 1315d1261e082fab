"""Ours, exact block norms: the tightest bound that only adds norms over keys.

Axes, in this file:  H head · Q query · K key · D, C model width.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.lipschitz.attended import Attended, attend
from equipoise.numerics.lipschitz.bound import Bound, Norm
from equipoise.numerics.lipschitz.heads import Heads
from equipoise.numerics.lipschitz.joint import query_matrices, rank_ones

# Numbers in a stack of D × D blocks: 128 MiB in fp64.
_BUDGET = 2**24


def block_bound(
    heads: Heads,
    x_KD: Float[Tensor, "K D"],
    *,
    mask: Tensor | None = None,
    norm: Norm = "block-inf",
) -> Bound:
    """Return max_i Σ_j ‖J_ij‖₂, or ‖(‖J_ij‖₂)_ij‖₂ in Frobenius norm.

    The second holds because ‖Σ_j J_ij z_j‖ ≤ Σ_j ‖J_ij‖‖z_j‖ is a matrix of numbers
    applied to a vector of lengths. Cost: one D × D eigenvalue problem per visible pair.
    """
    n_QK = block_norms(attend(heads, x_KD, mask=mask))
    whole = norm == "frobenius"
    value = torch.linalg.matrix_norm(n_QK, ord=2) if whole else n_QK.sum(-1).max()
    return Bound(
        value=float(value),
        scope="local",
        kind="first order",
        norm=norm,
        note="exact block norms",
    )


def block_norms(attended: Attended) -> Float[Tensor, "Q K"]:
    """Return ‖J_ij‖₂, the Jacobian of output i by input j, for every query and key."""
    values_HDC = attended.heads.w_v_GDF @ attended.heads.w_o_HFD
    step = max(1, _BUDGET // values_HDC[0].numel())
    rows = []
    for i in range(len(attended.at_Q)):
        row = attended.some(queries=slice(i, i + 1))
        rows.append(_row_norms(row, values_HDC, step=step))
    return torch.stack(rows)


def _row_norms(row: Attended, values_HDC: Tensor, *, step: int) -> Tensor:
    own_DC = query_matrices(row)[0]
    parts = []
    for start in range(0, len(row.at_K), step):
        part = row.some(keys=slice(start, start + step))
        j_KDC = _blocks(part, values_HDC)
        j_KDC[part.at_K == part.at_Q] += own_DC
        parts.append(_largest(j_KDC))
    return torch.cat(parts)


def _blocks(part: Attended, values_HDC: Tensor) -> Tensor:
    """Return value and key path of every block of one query's row."""
    a_KHD, b_KHD = (t[0] for t in rank_ones(part))
    value_KDC = torch.einsum("HK,HDC->KDC", part.p_HQK[:, 0], values_HDC)
    return value_KDC + a_KHD.mT @ b_KHD


def _largest(j_KDC: Tensor) -> Tensor:
    """Return ‖J‖₂ of each block; those of hidden keys are zero and cost nothing.

    From the Gram matrix: squaring loses the small singular values, not the largest.
    """
    n_K = torch.zeros_like(j_KDC[:, 0, 0])
    seen = (j_KDC != 0).flatten(1).any(-1)
    if seen.any():
        gram = j_KDC[seen] @ j_KDC[seen].mT
        n_K[seen] = torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0).sqrt()
    return n_K
