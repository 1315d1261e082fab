"""Attention as a function of q, k and v: its second derivative times a tangent.

Axes, in this file:  x any leading axes (batch, head) · Q query · K key ·
E width of queries and keys · F width of values.

o = a v with a = softmax(t), t = s·q kᵀ + mask. For a cotangent g at o, e = g vᵀ and
p = a∘(e − Σ a e) is the cotangent of t. The gradient is (s·p k, s·pᵀq, aᵀg); moving q,
k and v moves t, a, e and p, and the product is what that does to the gradient.
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.curvature.softmax import softmax_gradient, softmax_product


class QKV(NamedTuple):
    """One tensor for each input of attention."""

    q_xQE: Tensor
    k_xKE: Tensor
    v_xKF: Tensor


def attention_product(
    at: QKV,
    tangent: QKV,
    *,
    a_xQK: Float[Tensor, "*x Q K"],
    g_xQF: Float[Tensor, "*x Q F"],
    scale: float,
) -> QKV:
    """Return ∇²⟨g, o(q, k, v)⟩·(dq, dk, dv), in the memory of a few score matrices.

    ``a_xQK`` are the rows of attention at (q, k), whatever mask made them.
    """
    (q, k, v), (dq, dk, dv) = at, tangent
    e_xQK, p_xQK = g_xQF @ v.mT, softmax_gradient(a_xQK, g_xQF @ v.mT)
    dt_xQK = scale * (dq @ k.mT + q @ dk.mT)
    da_xQK = softmax_gradient(a_xQK, dt_xQK)
    dp_xQK = softmax_product(a_xQK, e_xQK, dt_xQK)
    dp_xQK = dp_xQK + softmax_gradient(a_xQK, g_xQF @ dv.mT)
    return QKV(
        scale * (dp_xQK @ k + p_xQK @ dk),
        scale * (dp_xQK.mT @ q + p_xQK.mT @ dq),
        da_xQK.mT @ g_xQF,
    )
