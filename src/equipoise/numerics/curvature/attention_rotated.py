"""Blocks of one head with rotated queries and keys: no two pairs (i, j) are alike.

Axes, in this file:  Q query · K key · D, C model width · E, A width of queries and keys
· F width of values · X = D·E flat.
"""

import torch
from torch import Tensor

from equipoise.numerics.curvature.attention_moments import (
    Queries,
    moment,
    pairs,
    summed,
)
from equipoise.numerics.lipschitz.rotary import Rotary


def rotated_blocks(queries: Queries, rotary: Rotary, *, output: bool) -> list[Tensor]:
    """Return qq, qk, kk, vq, vk and, with W_O, oq, ok, ov."""
    u_QKE = queries.at.pulled_keys()[0]
    w_QKX = (queries.x_KD[:, :, None] * u_QKE[:, :, None, :]).flatten(2)
    found = [_qq(queries), _qk(queries, rotary, w_QKX), _kk(queries, u_QKE, w_QKX)]
    found += _linear_in(queries, queries.x_KD, queries.c_QF, w_QKX)
    if output:
        found += _linear_in(queries, queries.at.v_HKF[0], queries.g_QC, w_QKX)
        found += [queries.ov()]
    return found


def _qq(queries: Queries) -> Tensor:
    k_QKE = queries.about(queries.at.k_HKE[0])
    m_QEA = queries.scale**2 * moment(queries.p_QK, k_QKE, k_QKE)
    m_QEA = _pulled(queries, _pulled(queries, m_QEA).mT)
    return summed(pairs(queries.x_QD, queries.x_QD), m_QEA).permute(0, 2, 1, 3)


def _qk(queries: Queries, rotary: Rotary, w_QKX: Tensor) -> Tensor:
    k_QKE = queries.about(queries.at.k_HKE[0])
    pk_QKE = queries.p_QK[..., None] * k_QKE
    mean_QX = _mean(queries.a_QK, w_QKX)
    bent_QEX = pk_QKE.mT @ w_QKX - pairs(pk_QKE.sum(1), mean_QX)
    t_QEX = queries.scale**2 * bent_QEX + queries.scale * _crossed(queries, rotary)
    h_DX = queries.x_QD.mT @ _pulled(queries, t_QEX).flatten(1)
    return _four(h_DX, queries, queries.x_QD.shape[1])


def _crossed(queries: Queries, rotary: Rotary) -> Tensor:
    """Return Σ_j p_ij R_j ⊗ x_j: the scores are linear in q and in k."""
    E = queries.at.k_HKE.shape[-1]
    eye_EE = torch.eye(E).to(queries.x_KD)
    # Row l of the turned identity is R_j e_l; R_j has it as a column.
    turn_KEA = rotary.turned(eye_EE[:, None], queries.at.at_K).permute(1, 2, 0)
    z_KEDA = queries.x_KD[:, None, :, None] * turn_KEA[:, :, None, :]
    z_QX = queries.p_QK @ z_KEDA.flatten(1)
    return z_QX.reshape(len(z_QX), E, -1)


def _kk(queries: Queries, u_QKE: Tensor, w_QKX: Tensor) -> Tensor:
    u_KQE, p_KQ = u_QKE.transpose(0, 1), queries.p_QK.mT
    own_DCEA = summed(pairs(queries.x_KD, queries.x_KD), moment(p_KQ, u_KQE, u_KQE))
    mean_QX, slope_QX = _mean(queries.a_QK, w_QKX), _mean(queries.p_QK, w_QKX)
    off_XX = slope_QX.mT @ mean_QX
    off_DECA = _four(off_XX + off_XX.mT, queries, queries.x_KD.shape[1])
    return queries.scale**2 * (own_DCEA.permute(0, 2, 1, 3) - off_DECA)


def _linear_in(
    queries: Queries, v_KF: Tensor, c_QC: Tensor, w_QKX: Tensor
) -> list[Tensor]:
    """Return the blocks with Q and with K of a weight the output is linear in."""
    av_QKF = queries.a_QK[..., None] * queries.about(v_KF)
    k_QKE = queries.about(queries.at.k_HKE[0])
    m_QFE = queries.scale * _pulled(queries, k_QKE.mT @ av_QKF).mT
    with_q = summed(pairs(c_QC, queries.x_QD), m_QFE).permute(2, 0, 1, 3)
    m_QFX = queries.scale * (av_QKF.mT @ w_QKX)
    with_k = torch.einsum("QC,QFX->FCX", c_QC, m_QFX)
    return [with_q, with_k.unflatten(2, (queries.x_KD.shape[1], -1))]


def _mean(b_QK: Tensor, w_QKX: Tensor) -> Tensor:
    return (b_QK[:, None] @ w_QKX)[:, 0]


def _four(h: Tensor, queries: Queries, width: int) -> Tensor:
    return h.reshape(width, queries.at.k_HKE.shape[-1], queries.x_KD.shape[1], -1)


def _pulled(queries: Queries, t_QEX: Tensor) -> Tensor:
    """Return R_iᵀ applied to each column: a direction of q_i as one of x_i W_Q."""
    return queries.at.pulled_queries(t_QEX[None])[0]
