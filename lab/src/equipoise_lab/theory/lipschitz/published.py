"""Published Lipschitz bounds of attention, by author: Emadi, Castin, Kim, Yudin.

Axes, in this file:  H head · Q query · K key · D model width · E width of queries ·
F width of values.  A = W_Q W_Kᵀ·scale/τ.

Emadi (2026), Thm 5.1, in block-∞ norm, with B = max_i ‖x_i‖₂:

    L ≤ ‖W_O‖₂ Σ_h (‖W_V^h‖₂ + θ̃_h/τ · Φ_h),
    Φ_h = 2B²/√d_h · ‖W_Q^h‖₂‖W_K^h‖₂‖W_V^h‖₂.

With θ̃ and B read at one input this bounds the derivative there, nothing more; as a
Lipschitz constant it needs θ̃ = 1 and a B no input exceeds.

Castin, Ablin and Peyré (2024), in Frobenius norm, n tokens inside a ball of radius R:

    Lip ≤ Σ_h ‖W_O^h‖₂ · √3 ‖W_V^h‖₂ (‖A_h‖₂² R⁴ (4n + 1) + n)^½.

Three terms of the derivative, each squared and summed over queries: averaging values
costs at most n, moving keys 4nR⁴‖A‖², moving the query R⁴‖A‖². None of them asks what
the weights are, so masks, caps and rotations leave it true.

Kim, Papamakarios and Mnih (2021): dot-product attention has no constant (Thm 3.1). L2
attention, with W_Q = W_K, p_ij ∝ exp(−‖x_i W_Q − x_j W_Q‖²/√E) and
y = Σ_h P_h X (W_Q W_Qᵀ/√E) W_V^h W_O^h, has one (Thm 3.2), in Frobenius norm, for N
tokens and φ(r) = r·exp(r + 1):

    √N/√E · (4φ⁻¹(N−1) + 1) · (Σ_h ‖W_Q^h‖₂⁴ ‖W_V^h‖₂²)^½ · ‖W_O‖₂.

Yudin et al. (2025), Thm 3, in Frobenius norm, reads the attention weights:

    ‖J‖₂ ≤ Σ_h ‖W_O^h‖₂ ‖W_V^h‖₂ (‖P_h‖₂ + 2 ‖X‖₂² ‖A_h‖₂ max_i g₁(p_i)),

g₁(p) = p₍₁₎(1 − p₍₁₎ + p₍₂₎) ≥ ‖diag p − ppᵀ‖₂. The theorem is for one head; W_O
and the sum over heads are ours.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.rows.balance import intervals
from equipoise.theory.lipschitz.bound import (
    Bound,
    check_covered,
    is_biased,
    length,
    mixing_norms,
    score_weights,
    spectral,
)
from equipoise.theory.lipschitz.forward import attend
from equipoise.theory.lipschitz.heads import Heads


def emadi_local(
    heads: Heads, x_KD: Float[Tensor, "K D"], *, mask: Tensor | None = None
) -> Bound:
    """Return Thm 5.1 with θ̃_h (certified from above) and B measured at x.

    A query that sees no key has no row, and counts with θ = 0.
    """
    check_covered(heads, "Emadi")
    attended = attend(heads, x_KD, mask=mask)
    # Blind and broken rows read NaN on purpose here: no warning.
    theta_HQ = intervals(attended.p_HQK, witness=False, effort=1.0).upper
    blind_HQ = attended.p_HQK.sum(-1) == 0
    theta_H = theta_HQ.masked_fill(blind_HQ, 0).amax(-1)
    radius = float(torch.linalg.vector_norm(x_KD.double(), dim=-1).max())
    value = _thm_5_1(attended.heads, theta_H, radius)
    return Bound(value=value, scope="local", kind="first order", note="Emadi Thm 5.1")


def emadi_ball(heads: Heads, *, radius: float) -> Bound:
    """Return Thm 5.1 with θ̃ = 1 for every input whose tokens are no longer than radius.

    After LayerNorm, radius = (‖γ‖_∞ + ‖β‖_∞)√D covers every input there is.
    """
    check_covered(heads, "Emadi")
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


def castin_bound(heads: Heads, *, radius: float, tokens: int) -> Bound:
    """Return the √n bound for every input whose tokens are no longer than radius."""
    check_covered(heads, "Castin et al.")
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


def kim_dot_product() -> Bound:
    """Return infinity: no constant serves every input of dot-product attention."""
    return Bound(
        value=math.inf,
        scope="global",
        kind="certified",
        norm="frobenius",
        note="Kim et al. Thm 3.1: dot-product attention is not Lipschitz",
    )


def kim_l2_attention(
    w_q_HDE: Float[Tensor, "H D E"],
    w_v_HDF: Float[Tensor, "H D F"],
    w_o_HFD: Float[Tensor, "H F D"],
    *,
    tokens: int,
) -> Bound:
    """Return Thm 3.2 for L2 attention with these weights.

    ‖W_Q‖ enters to the fourth power under the root. Public transcriptions have the
    second; but the map of s·W_Q at x is s times that of W_Q at s·x, so the constant
    grows with s². At ‖W_Q‖ = 1 the two agree, and scaling back gives the fourth.
    """
    if tokens < 1:
        raise InputError(f"L2 attention needs at least one token; got {tokens}")
    parts_H = spectral(w_q_HDE).pow(4) * spectral(w_v_HDF).square()
    weights = float(parts_H.sum().sqrt() * spectral(w_o_HFD.flatten(0, 1)))
    spread = math.sqrt(tokens / w_q_HDE.shape[-1]) * (4 * _phi_inverse(tokens - 1) + 1)
    return Bound(
        value=spread * weights,
        scope="global",
        kind="certified",
        norm="frobenius",
        note=f"Kim et al. Thm 3.2, L2 attention, {tokens} tokens",
    )


def _phi_inverse(n: float) -> float:
    """Return r ≥ 0 with r·exp(r + 1) = n, by Newton's method from above."""
    r = math.log1p(n)
    for _ in range(50):
        r -= (r - n * math.exp(-r - 1)) / (1 + n * math.exp(-r - 1))
    return r


def yudin_local(
    heads: Heads, x_KD: Float[Tensor, "K D"], *, mask: Tensor | None = None
) -> Bound:
    """Return Thm 3 at x. Rotations are refused: they break ‖XW‖₂ ≤ ‖X‖₂‖W‖₂."""
    check_covered(heads, "Yudin et al.", rotary=True)
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
