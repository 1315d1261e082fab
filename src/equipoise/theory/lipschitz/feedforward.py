"""Feed-forward nets: a global constant for plain ones, a local one for gated ones too.

Axes, in this file:  K token · D model width · M hidden width.  Row vectors: z = xW + b.

Tokens do not mix, so in block-∞ norm the constant is that of the worst token. A gated
net multiplies two linear maps of x: without a bound on x it has no constant at all.

Activations, and the steepest slope each of them has anywhere.

A bound on a feed-forward net that takes 1 for GELU is 13 % too small. The maxima of
GELU's tanh form, SiLU and Mish have no closed form: they are rounded up at 1e-12.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.theory.lipschitz.bound import Bound, spectral, wide
from equipoise.theory.lipschitz.local import moment_norm

Activation = Callable[[Tensor], Tensor]


def _quick_gelu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(1.702 * z)


def _gelu_tanh(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


def _relu_squared(z: Tensor) -> Tensor:
    return F.relu(z).square()


_SILU = 1.099839320129
# x = √2: Φ(√2) + √2·φ(√2)
_GELU = 0.5 * (1 + math.erf(1)) + 1 / (math.e * math.sqrt(math.pi))

ACTIVATIONS: dict[str, tuple[Activation, float]] = {
    "elu": (F.elu, 1.0),
    "gelu": (F.gelu, _GELU),
    "gelu_tanh": (_gelu_tanh, 1.128993068659),
    "hardswish": (F.hardswish, 1.5),
    "identity": (torch.clone, 1.0),
    "leaky_relu": (F.leaky_relu, 1.0),
    "mish": (F.mish, 1.088498161252),
    "quick_gelu": (_quick_gelu, _SILU),
    "relu": (F.relu, 1.0),
    "relu_squared": (_relu_squared, math.inf),
    "sigmoid": (torch.sigmoid, 0.25),
    "silu": (F.silu, _SILU),
    "softplus": (F.softplus, 1.0),
    "tanh": (torch.tanh, 1.0),
}


def activation_named(name: str) -> tuple[Activation, float]:
    """Return the function and max |slope| of an activation.

    Example:
        >>> round(activation_named("gelu")[1], 6)
        1.128904
    """
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise InputError(f"no activation {name!r}; known: {known}")
    return ACTIVATIONS[name]


def slopes(activation: Activation, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return φ(z) and φ'(z), entry by entry."""
    forward = torch.func.jvp(activation, (z,), (torch.ones_like(z),))
    return forward[0], forward[1]


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
