"""Ours, all heads together: paths of different heads partly cancel, and are let.

Axes, in this file:  H, G head · Q query · K key · D, C model width · E width of queries
and keys · F width of values.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.lipschitz.affine import spectral
from equipoise.numerics.lipschitz.attended import Attended
from equipoise.numerics.lipschitz.bound import Bound
from equipoise.numerics.lipschitz.forward import attend
from equipoise.numerics.lipschitz.heads import Heads
from equipoise.numerics.lipschitz.local import covariance
from equipoise.numerics.lipschitz.moments import moment_norm, moment_root

# Numbers in the largest temporary tensor (pairs × heads × width): 128 MiB in fp64.
_BUDGET = 2**24


def joint_bound(
    heads: Heads, x_KD: Float[Tensor, "K D"], *, mask: Tensor | None = None
) -> Bound:
    """Return the joint-head bound, local, in block-∞ norm: the largest of its rows."""
    value = float(joint_rows(attend(heads, x_KD, mask=mask)).max())
    return Bound(value=value, scope="local", kind="first order", note="joint heads")


def joint_rows(attended: Attended) -> Float[Tensor, " Q"]:
    """Return, per query, value + key + query path with the heads summed inside norms:

    Σ_j ‖Σ_h p^h_ij W_V W_O‖ + Σ_j ‖Σ_h key rank-ones‖ + ‖Σ_h query matrices‖,

    each norm replaced by a bound of it that does not need a D × D matrix per pair.
    """
    value_Q = value_path(attended)
    H, Q, K = attended.p_HQK.shape
    D = attended.heads.w_o_HFD.shape[-1]
    step = max(1, _BUDGET // (H * max(K, D) * D))
    rows = [
        _key_path(part) + _query_path(part)
        for part in (
            attended.some(queries=slice(i, i + step)) for i in range(0, Q, step)
        )
    ]
    return value_Q + torch.cat(rows)


def value_path(attended: Attended) -> Float[Tensor, " Q"]:
    """Return Σ_j of the least of three bounds on ‖Σ_h p^h_ij M_h‖, M_h = W_V^h W_O^h:

    - (Σ_hg p^h p^g T_hg)^½ with T_hg the norm of M_hᵀM_g, or of M_h M_gᵀ;
    - max_h p^h · ‖[W_V]‖₂‖[W_O]‖₂, the weights of all heads side by side;
    - p̄ ‖Σ_h M_h‖ + max_h |p^h − p̄| · ‖[W_V]‖₂‖[W_O]‖₂, near-exact where heads agree.
    """
    p_HQK, heads = attended.p_HQK, attended.heads
    w_v_CD = heads.w_v_GDF.permute(0, 2, 1).flatten(0, 1)
    w_o_CD = heads.w_o_HFD.flatten(0, 1)
    stacked = spectral(w_v_CD) * spectral(w_o_CD)
    mean_QK = p_HQK.mean(0)
    spread_QK = (p_HQK - mean_QK).abs().amax(0)
    bounds = [_paired(p_HQK, t_HG) for t_HG in _overlaps(heads)]
    bounds.append(p_HQK.amax(0) * stacked)
    bounds.append(mean_QK * spectral(w_v_CD.mT @ w_o_CD) + spread_QK * stacked)
    return torch.stack(bounds).amin(0).sum(-1)


def _paired(p_HQK: Tensor, t_HG: Tensor) -> Tensor:
    return torch.einsum("HQK,HG,GQK->QK", p_HQK, t_HG, p_HQK).sqrt()


def _overlaps(heads: Heads) -> tuple[Tensor, Tensor]:
    """Return ‖M_hᵀM_g‖₂ and ‖M_h M_gᵀ‖₂ for every pair of heads."""
    w_v, w_o = heads.w_v_GDF, heads.w_o_HFD
    r_v_HFF = torch.linalg.qr(w_v, mode="r").R
    r_o_HFF = torch.linalg.qr(w_o.mT, mode="r").R
    inner_v = torch.einsum("HDE,GDF->HGEF", w_v, w_v)
    inner_o = torch.einsum("HED,GFD->HGEF", w_o, w_o)
    left = r_o_HFF[:, None] @ inner_v @ r_o_HFF[None].mT
    right = r_v_HFF[:, None] @ inner_o @ r_v_HFF[None].mT
    return spectral(left), spectral(right)


def rank_ones(part: Attended) -> tuple[Tensor, Tensor]:
    """Return a, b with Σ_h a^h_ij ⊗ b^h_ij the key path; a's K is 1 if all agree."""
    a_QKHD = torch.einsum("HQKE,HDE->QKHD", part.pulled_keys(), part.heads.w_k_GDE)
    weighted_HQKF = (part.p_HQK * part.slope_HQK)[..., None] * part.deviations()
    b_QKHD = torch.einsum("HQKF,HFD->QKHD", weighted_HQKF, part.heads.w_o_HFD)
    return a_QKHD, b_QKHD


def query_matrices(part: Attended) -> Float[Tensor, "Q D D"]:
    """Return Σ_h W_Q [covariance of keys and values] W_O, as a map of x_i to y_i."""
    c_HQEF = part.pulled_queries(covariance(part))
    h = part.heads
    return torch.einsum("HDE,HQEF,HFC->QDC", h.w_q_HDE, c_HQEF, h.w_o_HFD)


def _key_path(part: Attended) -> Tensor:
    """Return Σ_j ‖AᵀB‖₂ from two H × H Gram matrices: ‖AᵀB‖₂² = λ_max(AAᵀ·BBᵀ)."""
    a_QKHD, b_QKHD = rank_ones(part)
    gram_QKHH = (a_QKHD @ a_QKHD.mT) @ (b_QKHD @ b_QKHD.mT)
    return moment_root(gram_QKHH).sqrt().sum(-1)


def _query_path(part: Attended) -> Tensor:
    return moment_norm(query_matrices(part))
