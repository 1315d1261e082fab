"""Yudin et al. (2025), Thm 3: a local bound that looks at the attention weights.

‖J‖₂ ≤ Σ_h ‖W_O^h‖₂ ‖W_V^h‖₂ (‖P_h‖₂ + 2 ‖X‖₂² ‖A_h‖₂ max_i g₁(p_i)),
g₁(p) = p₍₁₎(1 − p₍₁₎ + p₍₂₎) ≥ ‖diag p − ppᵀ‖₂,      A = W_Q W_Kᵀ·scale/τ,

in Frobenius norm. The theorem is for one head; W_O and the sum over heads are ours.

Axes, in this file:  H head · Q query · K key · D model width.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.lipschitz.affine import (
    is_biased,
    mixing_norms,
    refuse,
    spectral,
)
from equipoise.numerics.lipschitz.bound import Bound
from equipoise.numerics.lipschitz.forward import attend
from equipoise.numerics.lipschitz.heads import Heads


def yudin_local(
    heads: Heads, x_KD: Float[Tensor, "K D"], *, mask: Tensor | None = None
) -> Bound:
    """Return Thm 3 at x. Rotations are refused: they break ‖XW‖₂ ≤ ‖X‖₂‖W‖₂."""
    refuse(heads, "Yudin et al.", rotary=True)
    attended = attend(heads, x_KD, mask=mask)
    h, p_HQK = attended.heads, attended.p_HQK
    x_KD = x_KD.to(p_HQK)
    if is_biased(heads):
        x_KD = torch.nn.functional.pad(x_KD, (0, 1), value=1.0)
    score_H = 2 * spectral(x_KD).square() * mixing_norms(h) * g1(p_HQK).amax(-1)
    value_H = spectral(h.w_v_GDF) * spectral(h.w_o_HFD)
    return Bound(
        value=float((value_H * (spectral(p_HQK) + score_H)).sum()),
        scope="local",
        kind="first order",
        norm="frobenius",
        note="Yudin et al. Thm 3",
    )


def g1(p_xK: Float[Tensor, "*x K"]) -> Float[Tensor, "*x"]:
    """Return p₍₁₎(1 − p₍₁₎ + p₍₂₎), at least the spectral norm of softmax's Jacobian.

    Example:
        >>> g1(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
        tensor([0.5000, 0.0000])
    """
    if p_xK.shape[-1] == 1:
        return torch.zeros_like(p_xK[..., 0])
    first_x, second_x = p_xK.topk(2, dim=-1).values.unbind(-1)
    return first_x * (1 - first_x + second_x)
