"""The forward pass that our bounds read: from x, or from q, k and v as captured.

Axes, in this file:  H query head · G key/value head · Q query · K key · D model width ·
E width of queries and keys · F width of values.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.lipschitz.attended import Attended
from equipoise.numerics.lipschitz.headnorm import HeadNorm
from equipoise.numerics.lipschitz.heads import Heads

Mask = Bool[Tensor, "..."] | Float[Tensor, "..."]


def attend(
    heads: Heads,
    x_KD: Float[Tensor, "K D"],
    *,
    mask: Mask | None = None,
    queries: Int[Tensor, " Q"] | None = None,
) -> Attended:
    """Return one sequence's attention, of all queries or of those named.

    Args:
        heads: Weights and geometry.
        x_KD: Input of the layer (after its norm), one row per token.
        mask: True where a query sees a key, or numbers added to the scores; broadcast
            to (heads, all queries, keys). A row that sees nothing attends nowhere.
        queries: Positions of the queries wanted; keys are always all of them.
    """
    D = heads.w_q_HDE.shape[1]
    if x_KD.ndim != 2 or x_KD.shape[-1] != D:
        raise InputError(f"x must be (tokens, {D}); got {tuple(x_KD.shape)}")
    h = heads.expanded(x_KD)
    x_KD = x_KD.to(h.w_q_HDE.dtype)
    at_K = torch.arange(len(x_KD), device=x_KD.device)
    at_Q = at_K if queries is None else queries
    raw_q_HQE = _projected(x_KD[at_Q], h.w_q_HDE, h.b_q_HE)
    raw_k_HKE = _projected(x_KD, h.w_k_GDE, h.b_k_GE)
    added_HKK = _added(mask, (len(raw_k_HKE), len(at_K), len(at_K)), x_KD)
    return _attended(
        h,
        q=(raw_q_HQE, _seen(h, raw_q_HQE, at_Q, h.q_norm)),
        k=(raw_k_HKE, _seen(h, raw_k_HKE, at_K, h.k_norm)),
        v_HKF=_projected(x_KD, h.w_v_GDF, h.b_v_GF),
        added_HQK=added_HKK[:, at_Q],
        at_Q=at_Q,
    )


def attend_captured(
    heads: Heads,
    *,
    q_HQE: Float[Tensor, "H Q E"],
    k_GKE: Float[Tensor, "G K E"],
    v_GKF: Float[Tensor, "G K F"],
    mask: Mask | None = None,
    queries: Int[Tensor, " Q"] | None = None,
) -> Attended:
    """Return attention from q, k and v as ``scaled_dot_product_attention`` got them.

    Args:
        heads: Weights and geometry. QK-norm is refused: its derivative needs x.
        q_HQE: The queries wanted, after rotation.
        k_GKE, v_GKF: All keys and values; G may be fewer than H.
        mask: As for ``attend``, but broadcast to (heads, these queries, keys).
        queries: Where these queries stand among the keys; from 0 unless given.
    """
    H, G = len(heads.w_q_HDE), len(heads.w_k_GDE)
    if heads.q_norm is not None or heads.k_norm is not None:
        raise InputError("QK-norm differentiates what came before it: give x to attend")
    if (len(q_HQE), len(k_GKE), len(v_GKF)) != (H, G, G):
        shapes = [tuple(t.shape) for t in (q_HQE, k_GKE, v_GKF)]
        raise InputError(f"q, k, v must have {H}, {G}, {G} heads; got {shapes}")
    h = heads.expanded(q_HQE)
    q_HQE, k_HKE, v_HKF = (
        t.to(h.w_q_HDE).repeat_interleave(H // len(t), 0) for t in (q_HQE, k_GKE, v_GKF)
    )
    count, device = q_HQE.shape[1], q_HQE.device
    return _attended(
        h,
        q=(q_HQE, q_HQE),
        k=(k_HKE, k_HKE),
        v_HKF=v_HKF,
        added_HQK=_added(mask, (H, count, k_HKE.shape[1]), q_HQE),
        at_Q=torch.arange(count, device=device) if queries is None else queries,
    )


def _attended(
    h: Heads,
    *,
    q: tuple[Tensor, Tensor],
    k: tuple[Tensor, Tensor],
    v_HKF: Tensor,
    added_HQK: Tensor,
    at_Q: Tensor,
) -> Attended:
    """Return the record; q and k are (raw, as the scores see them)."""
    at_K = torch.arange(v_HKF.shape[1], device=v_HKF.device)
    if h.causal:
        added_HQK = added_HQK.masked_fill(at_K > at_Q[:, None], -torch.inf)
    p_HQK, slope_HQK = _weights(h, q[1] @ k[1].mT, added_HQK.to(v_HKF))
    return Attended(
        heads=h,
        q_HQE=q[1],
        k_HKE=k[1],
        v_HKF=v_HKF,
        p_HQK=p_HQK,
        slope_HQK=slope_HQK,
        o_HQF=p_HQK @ v_HKF,
        raw_q_HQE=q[0],
        raw_k_HKE=k[0],
        at_Q=at_Q,
        at_K=at_K,
    )


def _projected(x_KD: Tensor, w_HDE: Tensor, b_HE: Tensor | None) -> Tensor:
    u_HKE = x_KD @ w_HDE
    return u_HKE if b_HE is None else u_HKE + b_HE[:, None]


def _seen(h: Heads, raw_HKE: Tensor, at_K: Tensor, norm: HeadNorm | None) -> Tensor:
    u_HKE = raw_HKE if norm is None else norm.normalised(raw_HKE)
    return u_HKE if h.rotary is None else h.rotary.turned(u_HKE, at_K)


def _added(mask: Tensor | None, shape: tuple[int, int, int], like: Tensor) -> Tensor:
    """Return what is added to the scores: 0, −inf, or the user's numbers."""
    if mask is None:
        return like.new_zeros(()).expand(shape)
    try:
        mask_HQK = mask.expand(shape)
    except RuntimeError as error:
        raise InputError(
            f"mask of shape {tuple(mask.shape)} does not broadcast to {shape}"
        ) from error
    if mask.dtype == torch.bool:
        return torch.where(mask_HQK, 0.0, -torch.inf)
    return mask_HQK


def _weights(h: Heads, qk_HQK: Tensor, added_HQK: Tensor) -> tuple[Tensor, Tensor]:
    """Return p = softmax(z) and dz/d(q·k), exactly, cap and temperature included."""
    z_HQK = h.slope * qk_HQK
    slope_HQK = torch.full_like(z_HQK, h.slope)
    if h.softcap is not None:
        cap = h.softcap / h.temperature
        tanh_HQK = (z_HQK / cap).tanh()
        z_HQK = cap * tanh_HQK
        # 1 − tanh² loses every digit where the cap bites; 1/cosh² keeps them.
        slope_HQK = h.slope / (h.slope * qk_HQK / cap).cosh().square()
    z_HQK = z_HQK + added_HQK
    blind_HQ1 = (added_HQK == -torch.inf).all(-1, keepdim=True)
    p_HQK = z_HQK.masked_fill(blind_HQ1, 0.0).softmax(-1).masked_fill(blind_HQ1, 0.0)
    return p_HQK, slope_HQK
