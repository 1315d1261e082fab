"""Lipschitz bounds of layers: feed-forward nets, norms, residual forms, whole networks.

Axes, in this file:  K token · D model width · M hidden width.  Row vectors: z = xW + b.

Each residual form is one line: with n the norm's bound and f the branch's,

    pre-LN 1 + f·n     post-LN n(1 + f)     DeepNorm n(a + f)     sandwich 1 + n'·f·n.

RMSNorm enters through its own gain. Products are of bounds in block-∞ norm, where norms
act token by token; bounds read along one forward pass multiply to a bound there. In a
feed-forward net tokens do not mix either: its constant is that of the worst token. A
gated net multiplies two linear maps of x: without a bound on x it has no constant.
"""

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.norms import Gain, norm_lipschitz
from equipoise.theory.activations import activation_named, slopes
from equipoise.theory.lipschitz.bound import Bound, combined, spectral, wide
from equipoise.theory.lipschitz.local import moment_norm


def norm_local(gain: Gain) -> Bound:
    """Return the worst token's gain, from ``layer_norm_gain`` or ``rms_norm_gain``."""
    value = float(gain.upper.max())
    return Bound(value=value, scope="local", kind="first order", note="norm at x")


def norm_global(weight_D: Float[Tensor, " D"], *, eps: float) -> Bound:
    """Return ‖γ‖_∞/√ε: true everywhere; 316·‖γ‖_∞ at ε = 1e-5, so of little use."""
    value = float(norm_lipschitz(weight_D, eps=eps))
    return Bound(value=value, scope="global", kind="certified", note="norm anywhere")


def pre_norm(branch: Bound, *, norm: Bound, multiplier: float = 1.0) -> Bound:
    """Return the bound of x + m·f(norm(x)).

    Example:
        >>> f = Bound(value=2.0, scope="global", kind="certified")
        >>> pre_norm(f, norm=f).value
        5.0
    """
    value = 1 + abs(multiplier) * branch.value * norm.value
    return combined(value, [branch, norm], note="pre-norm")


def post_norm(branch: Bound, *, norm: Bound, multiplier: float = 1.0) -> Bound:
    """Return the bound of norm(x + m·f(x)); m is Emadi's α in his form of DeepNorm."""
    value = norm.value * (1 + abs(multiplier) * branch.value)
    return combined(value, [branch, norm], note="post-norm")


def deep_norm(branch: Bound, *, norm: Bound, alpha: float) -> Bound:
    """Return the bound of norm(α·x + f(x)), the form of Wang et al. (2022)."""
    value = norm.value * (abs(alpha) + branch.value)
    return combined(value, [branch, norm], note="DeepNorm")


def sandwich(branch: Bound, *, inner: Bound, outer: Bound) -> Bound:
    """Return the bound of x + outer(f(inner(x))), Gemma 2's and CogView's layer."""
    value = 1 + outer.value * branch.value * inner.value
    return combined(value, [branch, inner, outer], note="sandwich")


def parallel(branches: Iterable[Bound], *, norm: Bound) -> Bound:
    """Return the bound of x + Σ f_k(norm(x)), branches side by side (GPT-J, PaLM)."""
    parts = list(branches)
    value = 1 + norm.value * sum(part.value for part in parts)
    return combined(value, [*parts, norm], note="parallel")


def end_to_end(sublayers: Iterable[Bound]) -> tuple[float, Bound]:
    """Return the log of the product, and the product itself (inf where it overflows).

    Example:
        >>> layer = Bound(value=1e9, scope="global", kind="certified")
        >>> log, product = end_to_end([layer] * 72)
        >>> round(log), product.value
        (1492, inf)
    """
    parts = list(sublayers)
    if not parts:
        raise InputError("end_to_end needs at least one sublayer")
    log = sum(part.log for part in parts)  # fsum raises on inf − inf; this reads NaN
    value = math.inf if log > math.log(1.7e308) else math.exp(log)
    return log, combined(value, parts, note=f"{len(parts)} sublayers")


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
) -> Bound:
    """Return the worst token's constant of SwiGLU, (silu(x W_gate) ⊙ x W_up) W_down:

    max_i ‖(W_gate diag(φ'(g_i) ⊙ u_i) + W_up diag(φ(g_i))) W_down‖₂.
    """
    function, _ = activation_named("silu")
    x_KD, gate_DM, up_DM, down_MD = map(wide, (x_KD, w_gate_DM, w_up_DM, w_down_MD))
    value_KM, slope_KM = slopes(function, x_KD @ gate_DM)
    pairs = zip(slope_KM * (x_KD @ up_DM), value_KM, strict=True)
    return _worst([(gate_DM * s + up_DM * g) @ down_MD for s, g in pairs], "gated silu")


def _worst(j_DD: list[Tensor], note: str) -> Bound:
    value = float(torch.stack([moment_norm(j) for j in j_DD]).max())
    return Bound(value=value, scope="local", kind="first order", note=note)
