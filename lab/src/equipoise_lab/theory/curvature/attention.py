"""The curvature of attention, in q, k and v or in its weights, times a tangent.

Axes, in this file:  x any leading axes (batch, head) · H query head · G key/value head
· Q query · K key · L token · D model width · E width of queries and keys · F width of
values.

o = a v with a = softmax(t), t = s·q kᵀ + mask. For a cotangent g at o, e = g vᵀ and
p = a∘(e − Σ a e) is the cotangent of t. The gradient is (s·p k, s·pᵀq, aᵀg); moving q,
k and v moves t, a, e and p, and the product is what that does to the gradient.

In the weights y = Σ_h o_h W_O,h for one sequence x, with q, k and v linear in theirs.
Rotation is linear and a mask is constant, so both only change which matrices are
multiplied. A bias is one more row of its weight, for a channel of x that is always one.
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.theory.curvature.softmax import softmax_gradient, softmax_product
from equipoise.theory.lipschitz.forward import AttentionForward, Mask, attend
from equipoise.theory.lipschitz.heads import Heads


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


class Weights(NamedTuple):
    """One tensor for each weight of attention: a tangent, or a product with one."""

    q_HDE: Tensor
    k_GDE: Tensor
    v_GDF: Tensor
    o_HFD: Tensor


def attention_weights_product(
    heads: Heads,
    x_LD: Float[Tensor, "L D"],
    g_LD: Float[Tensor, "L D"],
    tangent: Weights,
    *,
    mask: Mask | None = None,
) -> Weights:
    """Return ∇²⟨g, y⟩·(dW_Q, dW_K, dW_V, dW_O): x and g are of one sequence."""
    at = plain_attention(heads, x_LD, mask=mask)
    x_LD = x_LD.to(at.p_HQK.dtype)
    g_LD, tangent = g_LD.to(x_LD), Weights(*(t.to(x_LD) for t in tangent))
    c_HLF, dc_HLF = g_LD @ at.heads.w_o_HFD.mT, g_LD @ tangent.o_HFD.mT
    moved = _moved(at, x_LD, tangent)
    bent = attention_product(
        QKV(at.q_HQE, at.k_HKE, at.v_HKF),
        moved,
        a_xQK=at.p_HQK,
        g_xQF=c_HLF,
        scale=at.heads.slope,
    )
    turned = _gradient(at, dc_HLF)
    into = QKV(*(a + b for a, b in zip(bent, turned, strict=True)))
    do_HLF = _output_moved(at, moved)
    return _pulled(at, x_LD, into, groups=len(heads.w_k_GDE), o_HFD=do_HLF.mT @ g_LD)


def plain_attention(
    heads: Heads, x_LD: Tensor, *, mask: Mask | None
) -> AttentionForward:
    """Return the forward pass; softcap and QK-norm are nodes of their own."""
    if heads.softcap is not None or heads.q_norm or heads.k_norm:
        raise InputError(
            "the closed form is of softmax(q·k): a softcap or QK-norm bends by itself; "
            "equipoise.auditing.curvature.attributed takes both into account"
        )
    return attend(heads, x_LD, mask=mask)


def _moved(at: AttentionForward, x_LD: Tensor, tangent: Weights) -> QKV:
    times = len(at.p_HQK) // len(tangent.k_GDE)
    dq, dk = x_LD @ tangent.q_HDE, x_LD @ tangent.k_GDE.repeat_interleave(times, 0)
    if (rotary := at.heads.rotary) is not None:
        dq, dk = rotary.rotate(dq, at.at_Q), rotary.rotate(dk, at.at_K)
    return QKV(dq, dk, x_LD @ tangent.v_GDF.repeat_interleave(times, 0))


def _gradient(at: AttentionForward, c_HLF: Tensor) -> QKV:
    """Return the gradient of ⟨c, o⟩ by q, k and v."""
    p_HQK = at.heads.slope * softmax_gradient(at.p_HQK, c_HLF @ at.v_HKF.mT)
    return QKV(p_HQK @ at.k_HKE, p_HQK.mT @ at.q_HQE, at.p_HQK.mT @ c_HLF)


def _output_moved(at: AttentionForward, moved: QKV) -> Tensor:
    dt_HQK = moved.q_xQE @ at.k_HKE.mT + at.q_HQE @ moved.k_xKE.mT
    da_HQK = softmax_gradient(at.p_HQK, at.heads.slope * dt_HQK)
    return da_HQK @ at.v_HKF + at.p_HQK @ moved.v_xKF


def _pulled(
    at: AttentionForward, x_LD: Tensor, into: QKV, *, groups: int, o_HFD: Tensor
) -> Weights:
    q, k, v = into
    if (rotary := at.heads.rotary) is not None:
        q, k = rotary.rotate_back(q, at.at_Q), rotary.rotate_back(k, at.at_K)

    def shared(w_HDE: Tensor) -> Tensor:
        w_GDE: Tensor = w_HDE.unflatten(0, (groups, -1)).sum(1)
        return w_GDE

    return Weights(x_LD.mT @ q, shared(x_LD.mT @ k), shared(x_LD.mT @ v), o_HFD)
