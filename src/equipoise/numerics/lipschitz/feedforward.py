"""Feed-forward nets: a global constant for plain ones, a local one for gated ones too.

Axes, in this file:  K token · D model width · M hidden width.  Row vectors: z = xW + b.

Tokens do not mix, so in block-∞ norm the constant is that of the worst token. A gated
net multiplies two linear maps of x: without a bound on x it has no constant at all.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.lipschitz.activations import activation_named, slopes
from equipoise.numerics.lipschitz.affine import spectral, wide
from equipoise.numerics.lipschitz.bound import Bound
from equipoise.numerics.lipschitz.moments import moment_norm


def feedforward_bound(
    w_in_DM: Float[Tensor, "D M"], w_out_MD: Float[Tensor, "M D"], *, activation: str
) -> Bound:
    """Return ‖W_in‖₂ · max|φ'| · ‖W_out‖₂, for every input.

    Example:
        >>> one = torch.ones(1, 1)
        >>> round(feedforward_bound(one, one, activation="silu").value, 4)
        1.0998
    """
    _, steepest = activation_named(activation)
    value = steepest * float(spectral(w_in_DM) * spectral(w_out_MD))
    return Bound(value=value, scope="global", kind="certified", note=activation)


def feedforward_local(
    x_KD: Float[Tensor, "K D"],
    w_in_DM: Float[Tensor, "D M"],
    w_out_MD: Float[Tensor, "M D"],
    *,
    activation: str,
    b_in_M: Float[Tensor, " M"] | None = None,
) -> Bound:
    """Return max_i ‖W_in diag(φ'(z_i)) W_out‖₂ at these tokens.

    Cost: D²(M + 8D) per token; pass a sample of tokens where that is too much.
    """
    function, _ = activation_named(activation)
    x_KD, w_in_DM, w_out_MD = wide(x_KD), wide(w_in_DM), wide(w_out_MD)
    z_KM = x_KD @ w_in_DM
    _, slope_KM = slopes(function, z_KM if b_in_M is None else z_KM + b_in_M)
    return _worst([w_in_DM * s_M @ w_out_MD for s_M in slope_KM], activation)


def gated_local(
    x_KD: Float[Tensor, "K D"],
    w_gate_DM: Float[Tensor, "D M"],
    w_up_DM: Float[Tensor, "D M"],
    *,
    w_down_MD: Float[Tensor, "M D"],
    activation: str = "silu",
) -> Bound:
    """Return the worst token's constant of SwiGLU's (φ(x W_gate) ⊙ x W_up) W_down:

    max_i ‖(W_gate diag(φ'(g_i) ⊙ u_i) + W_up diag(φ(g_i))) W_down‖₂.
    """
    function, _ = activation_named(activation)
    x_KD, gate_DM, up_DM, down_MD = map(wide, (x_KD, w_gate_DM, w_up_DM, w_down_MD))
    value_KM, slope_KM = slopes(function, x_KD @ gate_DM)
    pairs = zip(slope_KM * (x_KD @ up_DM), value_KM, strict=True)
    note = f"gated {activation}"
    return _worst([(gate_DM * s + up_DM * g) @ down_MD for s, g in pairs], note)


def _worst(j_DD: list[Tensor], note: str) -> Bound:
    value = float(torch.stack([moment_norm(j) for j in j_DD]).max())
    return Bound(value=value, scope="local", kind="first order", note=note)
