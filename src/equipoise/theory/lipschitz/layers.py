"""Whole layers from the bounds of their parts, and whole networks as sums of logs.

Axes, in this file:  K token · D model width.

Each residual form is one line: with n the norm's bound and f the branch's,

    pre-LN 1 + f·n     post-LN n(1 + f)     DeepNorm n(a + f)     sandwich 1 + n'·f·n.

RMSNorm enters through its own gain. Products are of bounds in block-∞ norm, where norms
act token by token; bounds read along one forward pass multiply to a bound there.
"""

import math
from collections.abc import Iterable

from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.norms import Gain, norm_lipschitz
from equipoise.theory.lipschitz.bound import Bound, combined


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
