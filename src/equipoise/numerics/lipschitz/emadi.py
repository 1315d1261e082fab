"""Emadi (2026), Thm 5.1: multi-head attention in block-∞ norm.

L ≤ ‖W_O‖₂ Σ_h (‖W_V^h‖₂ + θ̃_h/τ · Φ_h),
Φ_h = 2B²/√d_h · ‖W_Q^h‖₂‖W_K^h‖₂‖W_V^h‖₂,      B = max_i ‖x_i‖₂.

Axes, in this file:  H head · Q query · K key · D model width.

With θ̃ and B read at one input this bounds the derivative there, nothing more; as a
Lipschitz constant it needs θ̃ = 1 and a B no input exceeds.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.balance import balance
from equipoise.numerics.lipschitz.affine import length, refuse, score_weights, spectral
from equipoise.numerics.lipschitz.bound import Bound
from equipoise.numerics.lipschitz.forward import attend
from equipoise.numerics.lipschitz.heads import Heads


def emadi_local(
    heads: Heads, x_KD: Float[Tensor, "K D"], *, mask: Tensor | None = None
) -> Bound:
    """Return Thm 5.1 with θ̃_h (certified from above) and B measured at x.

    A query that sees no key has no row, and counts with θ = 0.
    """
    refuse(heads, "Emadi")
    attended = attend(heads, x_KD, mask=mask)
    theta_HQ = balance(attended.p_HQK).upper
    blind_HQ = attended.p_HQK.sum(-1) == 0
    theta_H = theta_HQ.masked_fill(blind_HQ, 0).amax(-1)
    radius = float(torch.linalg.vector_norm(x_KD.double(), dim=-1).max())
    value = _thm_5_1(attended.heads, theta_H, radius)
    return Bound(value=value, scope="local", kind="first order", note="Emadi Thm 5.1")


def emadi_ball(heads: Heads, *, radius: float) -> Bound:
    """Return Thm 5.1 with θ̃ = 1 for every input whose tokens are no longer than radius.

    After LayerNorm, radius = (‖γ‖_∞ + ‖β‖_∞)√D covers every input there is.
    """
    refuse(heads, "Emadi")
    h = heads.expanded(heads.w_q_HDE)
    value = _thm_5_1(h, torch.ones(len(h.w_q_HDE)), radius)
    note = f"Emadi Thm 5.1 with theta 1, tokens up to {radius:.4g}"
    return Bound(value=value, scope="ball", kind="certified", note=note)


def _thm_5_1(heads: Heads, theta_H: Tensor, radius: float) -> float:
    w_q_HDE, w_k_HDE = score_weights(heads)
    v_H = spectral(heads.w_v_GDF)
    qkv_H = spectral(w_q_HDE) * spectral(w_k_HDE) * v_H
    phi_H = 2 * length(heads, radius) ** 2 * heads.slope * qkv_H
    out = spectral(heads.w_o_HFD.flatten(0, 1))
    return float(out * (v_H + theta_H.to(phi_H) * phi_H).sum())
