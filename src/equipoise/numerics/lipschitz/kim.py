"""Kim, Papamakarios and Mnih (2021): which attention has a Lipschitz constant at all.

Dot-product attention has none (their Thm 3.1). L2 attention, with W_Q = W_K,

    p_ij ∝ exp(−‖x_i W_Q − x_j W_Q‖²/√E),      y = Σ_h P_h X (W_Q W_Qᵀ/√E) W_V^h W_O^h,

has one (Thm 3.2), in Frobenius norm, for N tokens and φ(r) = r·exp(r + 1):

    √N/√E · (4φ⁻¹(N−1) + 1) · (Σ_h ‖W_Q^h‖₂⁴ ‖W_V^h‖₂²)^½ · ‖W_O‖₂.

Axes, in this file:  H head · D model width · E width of queries · F width of values.
"""

import math

from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.lipschitz.affine import spectral
from equipoise.numerics.lipschitz.bound import Bound


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
