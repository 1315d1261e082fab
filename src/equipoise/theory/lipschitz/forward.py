"""The forward pass of one attention layer at one input, with all its Jacobian needs.

Axes, in this file:  H query head · G key/value head · Q query · K key · D model width ·
E width of queries and keys · F width of values.  Q may be a sample of the queries; K is
the full sequence.

``attend`` starts from x, ``attend_captured`` from q, k and v as the model computed
them. With z_ij the score, c_ij = dz_ij/d(q_i·k_j) and u_ij = v_j − o_i,

    dy_i = Σ_h [ Σ_j p_ij dx_j W_V  +  Σ_j p_ij c_ij (dq_i·k_j + q_i·dk_j) u_ij ] W_O:

the value path, the query path and the key path. ``pulled_keys`` and ``pulled_queries``
carry vectors back from the scores to x W_K and x W_Q, through rotation and QK-norm.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.errors import InputError
from equipoise.theory.lipschitz.heads import HeadNorm, Heads

ALL = slice(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForward:
    """Queries, keys and values as the scores see them, with weights and slopes."""

    heads: Heads
    """As many key/value heads as query heads."""
    q_HQE: Tensor
    k_HKE: Tensor
    v_HKF: Tensor
    p_HQK: Tensor
    slope_HQK: Tensor
    o_HQF: Tensor
    raw_q_HQE: Tensor
    """x W_Q + b_Q, before QK-norm and rotation."""
    raw_k_HKE: Tensor
    at_Q: Tensor
    at_K: Tensor

    def some(
        self, *, heads: slice = ALL, queries: slice = ALL, keys: slice = ALL
    ) -> "AttentionForward":
        """Return the same attention restricted to a block; o stays as it was."""
        h = self.heads
        few = replace(
            h,
            w_q_HDE=h.w_q_HDE[heads],
            w_k_GDE=h.w_k_GDE[heads],
            w_v_GDF=h.w_v_GDF[heads],
            w_o_HFD=h.w_o_HFD[heads],
        )
        return AttentionForward(
            heads=few,
            q_HQE=self.q_HQE[heads, queries],
            k_HKE=self.k_HKE[heads, keys],
            v_HKF=self.v_HKF[heads, keys],
            p_HQK=self.p_HQK[heads, queries, keys],
            slope_HQK=self.slope_HQK[heads, queries, keys],
            o_HQF=self.o_HQF[heads, queries],
            raw_q_HQE=self.raw_q_HQE[heads, queries],
            raw_k_HKE=self.raw_k_HKE[heads, keys],
            at_Q=self.at_Q[queries],
            at_K=self.at_K[keys],
        )

    def pulled_keys(self) -> Float[Tensor, "H Q K E"]:
        """Return what q_i means to x_j W_K, pair by pair; K is 1 if all keys agree."""
        q_HQ1E, norm = self.q_HQE[:, :, None], self.heads.k_norm
        if self.heads.rotary is not None:
            q_HQ1E = self.heads.rotary.rotate_back(q_HQ1E, self.at_K)
        return q_HQ1E if norm is None else norm.pulled(q_HQ1E, self.raw_k_HKE[:, None])

    def pulled_queries(self, c_HQEF: Tensor) -> Float[Tensor, "H Q E F"]:
        """Return each column of c, a direction of q_i, as a direction of x_i W_Q."""
        c_HFQE, norm = c_HQEF.permute(0, 3, 1, 2), self.heads.q_norm
        if self.heads.rotary is not None:
            c_HFQE = self.heads.rotary.rotate_back(c_HFQE, self.at_Q)
        if norm is not None:
            c_HFQE = norm.pulled(c_HFQE, self.raw_q_HQE[:, None])
        return c_HFQE.permute(0, 2, 3, 1)

    def deviations(self) -> Float[Tensor, "H Q K F"]:
        """Return v_j − o_i, subtracted before anything else: they may nearly agree."""
        return self.v_HKF[:, None] - self.o_HQF[:, :, None]


Mask = Bool[Tensor, "..."] | Float[Tensor, "..."]


def attend(
    heads: Heads,
    x_KD: Float[Tensor, "K D"],
    *,
    mask: Mask | None = None,
    queries: Int[Tensor, " Q"] | None = None,
) -> AttentionForward:
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
) -> AttentionForward:
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
) -> AttentionForward:
    """Return the record; q and k are (raw, as the scores see them)."""
    at_K = torch.arange(v_HKF.shape[1], device=v_HKF.device)
    if h.causal:
        added_HQK = added_HQK.masked_fill(at_K > at_Q[:, None], -torch.inf)
    p_HQK, slope_HQK = _weights(h, q[1] @ k[1].mT, added_HQK.to(v_HKF))
    return AttentionForward(
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
    return u_HKE if h.rotary is None else h.rotary.rotate(u_HKE, at_K)


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
