"""Blocks of one head without rotation: one product over the queries for each.

Axes, in this file:  Q query · K key · D, C model width · E, A width of queries and keys
· F width of values.

u_ij = q_i whatever the key, so M(w, ·) = M(x, ·) ⊗ q_i and every block is a sum over
queries of two matrices. A block is read with its axes permuted, and never copied.
"""

from torch import Tensor

from equipoise.numerics.curvature.attention_moments import (
    Queries,
    moment,
    pairs,
    summed,
)


def plain_blocks(queries: Queries, *, output: bool) -> list[Tensor]:
    """Return qq, qk, kk, vq, vk and, with W_O, oq, ok, ov."""
    found = [_qq(queries), _qk(queries), _kk(queries)]
    found += _linear_in(queries, queries.x_KD, queries.c_QF)
    if output:
        found += _linear_in(queries, queries.at.v_HKF[0], queries.g_QC)
        found += [queries.ov()]
    return found


def _qq(queries: Queries) -> Tensor:
    k_QKE = queries.about(queries.at.k_HKE[0])
    m_QEA = queries.scale**2 * moment(queries.p_QK, k_QKE, k_QKE)
    h_DCEA = summed(pairs(queries.x_QD, queries.x_QD), m_QEA)
    return h_DCEA.permute(0, 2, 1, 3)


def _kk(queries: Queries) -> Tensor:
    x_QKD, q_QE = queries.about(queries.x_KD), queries.at.q_HQE[0]
    m_QDC = queries.scale**2 * moment(queries.p_QK, x_QKD, x_QKD)
    h_DCEA = summed(m_QDC, pairs(q_QE, q_QE))
    return h_DCEA.permute(0, 2, 1, 3)


def _qk(queries: Queries) -> Tensor:
    k_QKE, x_QKD = queries.about(queries.at.k_HKE[0]), queries.about(queries.x_KD)
    m_QEC = queries.scale**2 * moment(queries.p_QK, k_QKE, x_QKD)
    h_DAEC = summed(pairs(queries.x_QD, queries.at.q_HQE[0]), m_QEC)
    h_DECA = h_DAEC.permute(0, 2, 3, 1)
    # Scores are linear in q and in k: s Σ_ij p_ij x_ix_jᵀ where their channels meet.
    crossed_DC = queries.x_QD.mT @ queries.p_QK @ queries.x_KD
    h_DECA.diagonal(dim1=1, dim2=3).add_(queries.scale * crossed_DC[..., None])
    return h_DECA


def _linear_in(queries: Queries, v_KF: Tensor, c_QC: Tensor) -> list[Tensor]:
    """Return the blocks with Q and with K of a weight the output is linear in.

    v_j is what that weight multiplies and c_i the cotangent of the product: (x, c) for
    W_V and (v, g) for W_O.
    """
    a_QK, v_QKF = queries.a_QK, queries.about(v_KF)
    k_QKE, x_QKD = queries.about(queries.at.k_HKE[0]), queries.about(queries.x_KD)
    m_QFE = queries.scale * moment(a_QK, v_QKF, k_QKE)
    m_QFD = queries.scale * moment(a_QK, v_QKF, x_QKD)
    h_CDFE = summed(pairs(c_QC, queries.x_QD), m_QFE)
    h_CEFD = summed(pairs(c_QC, queries.at.q_HQE[0]), m_QFD)
    return [h_CDFE.permute(2, 0, 1, 3), h_CEFD.permute(2, 0, 3, 1)]
