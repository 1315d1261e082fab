"""One layer of attention at one input: everything its Jacobian is made of.

Axes, in this file:  H head · Q query · K key · D model width · E width of queries and
keys · F width of values.  Q may be a sample of the queries; K is the whole sequence.

With z_ij the score, c_ij = dz_ij/d(q_i·k_j) and u_ij = v_j − o_i,

    dy_i = Σ_h [ Σ_j p_ij dx_j W_V  +  Σ_j p_ij c_ij (dq_i·k_j + q_i·dk_j) u_ij ] W_O:

the value path, the query path and the key path. ``pulled_keys`` and ``pulled_queries``
carry vectors back from the scores to x W_K and x W_Q, through rotation and QK-norm.
"""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.lipschitz.heads import Heads

ALL = slice(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
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
    ) -> "Attended":
        """Return the same attention restricted to a block; o stays as it was."""
        h = self.heads
        few = replace(
            h,
            w_q_HDE=h.w_q_HDE[heads],
            w_k_GDE=h.w_k_GDE[heads],
            w_v_GDF=h.w_v_GDF[heads],
            w_o_HFD=h.w_o_HFD[heads],
        )
        return Attended(
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
            q_HQ1E = self.heads.rotary.unturned(q_HQ1E, self.at_K)
        return q_HQ1E if norm is None else norm.pulled(q_HQ1E, self.raw_k_HKE[:, None])

    def pulled_queries(self, c_HQEF: Tensor) -> Float[Tensor, "H Q E F"]:
        """Return each column of c, a direction of q_i, as a direction of x_i W_Q."""
        c_HFQE, norm = c_HQEF.permute(0, 3, 1, 2), self.heads.q_norm
        if self.heads.rotary is not None:
            c_HFQE = self.heads.rotary.unturned(c_HFQE, self.at_Q)
        if norm is not None:
            c_HFQE = norm.pulled(c_HFQE, self.raw_q_HQE[:, None])
        return c_HFQE.permute(0, 2, 3, 1)

    def deviations(self) -> Float[Tensor, "H Q K F"]:
        """Return v_j − o_i, subtracted before anything else: they may nearly agree."""
        return self.v_HKF[:, None] - self.o_HQF[:, :, None]
