"""Ours, exact block norms: the tightest bound that only adds norms over keys.

Axes, in this file:  H head · Q query · K key · D, C model width.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.lipschitz.affine import spectral
from equipoise.numerics.lipschitz.attended import Attended
from equipoise.numerics.lipschitz.bound import Bound, Norm
from equipoise.numerics.lipschitz.forward import attend
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
    value = spectral(n_QK) if whole else n_QK.sum(-1).max()
    return Bound(
        value=float(value),
        scope="local",
        kind="first order",
        norm=norm,
        note="exact block norms",
    )


def block_norms(attended: Attended) -> Float[Tensor, "Q K"]:
    """Return ‖J_ij‖₂, the Jacobian of output i by input j, for every query and key."""
    rows = [
        torch.cat([_largest(j_KDC) for j_KDC in row_blocks(attended, i)])
        for i in range(len(attended.at_Q))
    ]
    return torch.stack(rows)


def row_blocks(attended: Attended, i: int) -> Iterator[Float[Tensor, "K D C"]]:
    """Yield a query's blocks, dy_i = Σ_j dx_j J_ij, a budget of keys at a time."""
    row = attended.some(queries=slice(i, i + 1))
    own_DC = query_matrices(row)[0]
    step = max(1, _BUDGET // own_DC.numel())
    for start in range(0, len(row.at_K), step):
        part = row.some(keys=slice(start, start + step))
        j_KDC = _value_and_key_path(part)
        j_KDC[part.at_K == part.at_Q] += own_DC
        yield j_KDC


def _value_and_key_path(part: Attended) -> Tensor:
    values_HDC = part.heads.w_v_GDF @ part.heads.w_o_HFD
    a_KHD, b_KHD = (t[0] for t in rank_ones(part))
    value_KDC = torch.einsum("HK,HDC->KDC", part.p_HQK[:, 0], values_HDC)
    return value_KDC + a_KHD.mT @ b_KHD


def _largest(j_KDC: Tensor) -> Tensor:
    """Return ‖J‖₂ of each block: zero where a key is hidden, NaN where one is broken.

    From the Gram matrix: squaring loses the small singular values, not the largest.
    """
    size_K = j_KDC.abs().flatten(1).sum(-1)
    n_K, sound_K = size_K.clone(), size_K.isfinite() & (size_K > 0)
    if sound_K.any():
        gram = j_KDC[sound_K] @ j_KDC[sound_K].mT
        n_K[sound_K] = torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0).sqrt()
    return n_K
