"""Some queries of one head of attention, and the moments that its blocks are made of.

Axes, in this file:  Q query · K key · L token · D, C model width · E, A width of
queries and keys · F width of values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.numerics.curvature.softmax import softmax_gradient
from equipoise.numerics.lipschitz.attended import Attended


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """One head at its point, as seen by some of its queries."""

    at: Attended
    """Of one head."""
    x_QD: Tensor
    x_KD: Tensor
    g_QC: Tensor
    """Cotangent of the layer's output."""
    c_QF: Tensor
    """Of this head's output."""
    p_QK: Tensor
    """Of its scores."""

    @property
    def a_QK(self) -> Tensor:
        return self.at.p_HQK[0]

    @property
    def scale(self) -> float:
        return self.at.heads.slope

    def about(self, f_KD: Tensor) -> Tensor:
        """Return f_j − Σ_j a_ij f_j for every query."""
        return f_KD - (self.a_QK @ f_KD)[:, None]

    def ov(self) -> Tensor:
        """Return δ_ff' Σ_i g_ic m_id, the block of W_O with W_V."""
        m_CD = self.g_QC.mT @ (self.a_QK @ self.x_KD)
        eye_FF = torch.eye(self.c_QF.shape[1]).to(m_CD)
        return eye_FF[:, None, None, :] * m_CD[None, :, :, None]


def queries_of(at: Attended, x_LD: Tensor, g_LD: Tensor) -> Queries:
    """Return what a block needs of one head; ``at`` may hold a part of its queries."""
    g_QC = g_LD[at.at_Q]
    c_QF = g_QC @ at.heads.w_o_HFD[0].mT
    p_QK = softmax_gradient(at.p_HQK[0], c_QF @ at.v_HKF[0].mT)
    return Queries(
        at=at, x_QD=x_LD[at.at_Q], x_KD=x_LD, g_QC=g_QC, c_QF=c_QF, p_QK=p_QK
    )


def moment(b_QK: Tensor, f_QKD: Tensor, h_QKE: Tensor) -> Tensor:
    """Return Σ_j b_ij f_ij h_ijᵀ, one matrix per query."""
    return (b_QK[..., None] * f_QKD).mT @ h_QKE


def pairs(f_QD: Tensor, h_QE: Tensor) -> Tensor:
    """Return f_i h_iᵀ, one matrix per query."""
    return f_QD[:, :, None] * h_QE[:, None, :]


def summed(f_QDE: Tensor, h_QCA: Tensor) -> Tensor:
    """Return Σ_i f_i ⊗ h_i with four axes, by one product of matrices."""
    flat = f_QDE.flatten(1).mT @ h_QCA.flatten(1)
    return flat.reshape(*f_QDE.shape[1:], *h_QCA.shape[1:])
