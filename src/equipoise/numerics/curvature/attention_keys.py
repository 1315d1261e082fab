"""How the scores of one head move with W_K, each way of bounding it as factors.

Axes, in this file:  Q query · K key · D model width · E width of queries and keys ·
A channel of some factor.

Plain keys: dt_ij = s·q_iᵀ dW_Kᵀ x_j, the factor x_j at every query's own q_i. Rotation
couples them, dt_ij = s·⟨x_j ⊗ R_jᵀq_i, dW_K⟩: either all of it is the factor and no
more is left to a query; or the keys move freely, the factor e_j at every q_i, times
‖Σ_j ‖R_j‖² x_jx_jᵀ‖^½, by which W_K moves all keys at most (‖X‖, if R_j keep lengths).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.numerics.curvature.attention_moments import Queries
from equipoise.numerics.lipschitz.rotary import Rotary


class KeySide(NamedTuple):
    """Σ_j b_ij f_ij (dt_ij/s), for any f: ‖M_i‖ with this factor, times ‖left_i‖."""

    factor_QKA: Tensor
    """About its mean under a_i."""
    left_QE: Tensor


def key_sides(queries: Queries) -> list[KeySide]:
    """Return every way; a bound may take the least."""
    q_QE, rotary = queries.at.q_HQE[0], queries.at.heads.rotary
    if rotary is None:
        return [KeySide(queries.about(queries.x_KD), q_QE)]
    turns_KEE = _turns(rotary, queries)
    sizes_K1 = torch.linalg.matrix_norm(turns_KEE, ord=2)[:, None]
    most = torch.linalg.matrix_norm(sizes_K1 * queries.x_KD, ord=2)
    free_QKK = queries.about(torch.eye(len(queries.x_KD)).to(q_QE))
    return [
        KeySide(_whole(queries), torch.ones_like(q_QE[:, :1])),
        KeySide(most * free_QKK, q_QE),
    ]


def _whole(queries: Queries) -> Tensor:
    """Return factors with the inner products of x_j ⊗ R_jᵀq_i about their mean."""
    u_QKE = queries.at.pulled_keys()[0]
    gram_QKK = (u_QKE @ u_QKE.mT) * (queries.x_KD @ queries.x_KD.mT)
    eye_KK = torch.eye(gram_QKK.shape[-1]).to(gram_QKK)
    about_QKK = eye_KK - queries.a_QK[:, None]
    values_QA, vectors_QKA = torch.linalg.eigh(about_QKK @ gram_QKK @ about_QKK.mT)
    factor_QKA: Tensor = vectors_QKA * values_QA.clamp_min(0).sqrt()[:, None]
    return factor_QKA


def _turns(rotary: Rotary, queries: Queries) -> Tensor:
    """Return R_j of every key."""
    eye_EE = torch.eye(queries.at.k_HKE.shape[-1]).to(queries.x_KD)
    return rotary.turned(eye_EE[:, None], queries.at.at_K).permute(1, 2, 0)


def crossed_norm(queries: Queries) -> Tensor:
    """Return ‖Σ_ij p_ij x_ix_jᵀ ⊗ R_iᵀR_j‖: scores are linear in q and in k."""
    rotary, x_KD, p_QK = queries.at.heads.rotary, queries.x_KD, queries.p_QK
    norm = torch.linalg.matrix_norm
    if rotary is None:
        plain: Tensor = norm(queries.x_QD.mT @ p_QK @ x_KD, ord=2)
        return plain
    turns_KEE = _turns(rotary, queries)
    found = []
    for channels in _turned_together(rotary, turns_KEE.shape[-1]):
        turn_KEE = turns_KEE[:, channels][..., channels]
        moved_EKX = torch.einsum("KEA,KD->EKDA", turn_KEE, x_KD).flatten(2)
        asked_EQX = moved_EKX[:, queries.at.at_Q]
        found.append(norm((asked_EQX.mT @ p_QK @ moved_EKX).sum(0), ord=2))
    return torch.stack(found).max()


def _turned_together(rotary: Rotary, width: int) -> list[list[int]]:
    """Return the channels in groups that a rotation does not mix."""
    turned = rotary.cos_LR.shape[-1]
    half = turned // 2
    if rotary.interleaved:
        pairs = [[2 * r, 2 * r + 1] for r in range(half)]
    else:
        pairs = [[r, r + half] for r in range(half)]
    return pairs + ([[turned]] if turned < width else [])
