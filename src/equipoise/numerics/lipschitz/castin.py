"""Castin, Ablin and Peyré (2024): attention of n tokens inside a ball of radius R.

Lip ≤ Σ_h ‖W_O^h‖₂ · √3 ‖W_V^h‖₂ (‖A_h‖₂² R⁴ (4n + 1) + n)^½,   A = W_Q W_Kᵀ·scale/τ,

in Frobenius norm. Three terms of the derivative, each squared and summed over queries:
averaging values costs at most n, moving keys 4nR⁴‖A‖², moving the query R⁴‖A‖². None of
them asks what the weights are, so masks, caps and rotations leave it true.
"""

import math

from equipoise.numerics.lipschitz.affine import length, mixing_norms, refuse, spectral
from equipoise.numerics.lipschitz.bound import Bound
from equipoise.numerics.lipschitz.heads import Heads


def castin_bound(heads: Heads, *, radius: float, tokens: int) -> Bound:
    """Return the √n bound for every input whose tokens are no longer than radius."""
    refuse(heads, "Castin et al.")
    h = heads.expanded(heads.w_q_HDE)
    reach_H = mixing_norms(h).square() * length(h, radius) ** 4 * (4 * tokens + 1)
    value_H = spectral(h.w_v_GDF) * spectral(h.w_o_HFD)
    return Bound(
        value=math.sqrt(3) * float((value_H * (reach_H + tokens).sqrt()).sum()),
        scope="ball",
        kind="certified",
        norm="frobenius",
        note=f"Castin et al., {tokens} tokens up to {radius:.4g}",
    )
