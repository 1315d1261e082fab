"""One attention layer as tensors: weights per head, and how scores become weights.

Axes, in this file:  H query head · G key/value head (G divides H) · D model width ·
E width of queries and keys · F width of values.  Row vectors: q = x W_Q + b_Q.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.lipschitz.headnorm import HeadNorm
from equipoise.numerics.lipschitz.rotary import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Weights and geometry of multi-head attention; the output bias plays no part.

    Scores are z = softcap(scale · q·k)/τ + mask, with q and k after QK-norm and then
    rotation. A model that divides by τ before its cap folds τ into ``scale``.
    """

    w_q_HDE: Tensor
    w_k_GDE: Tensor
    w_v_GDF: Tensor
    w_o_HFD: Tensor
    b_q_HE: Tensor | None = None
    b_k_GE: Tensor | None = None
    b_v_GF: Tensor | None = None
    scale: float | None = None
    """1/√E unless given."""
    temperature: float = 1.0
    softcap: float | None = None
    """c in c·tanh(score/c)."""
    causal: bool = False
    rotary: Rotary | None = None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None

    def __post_init__(self) -> None:
        shapes = [w.shape for w in self.weights]
        (H, D, E), (G, *k), (G2, D3, F), (H2, F2, D4) = shapes
        if k != [D, E] or (G2, D3, F2) != (G, D, F) or (H2, D4) != (H, D) or H % G:
            raise InputError(
                "attention weights must be W_Q (H,D,E), W_K (G,D,E), W_V (G,D,F), "
                f"W_O (H,F,D) with G dividing H; got {[tuple(s) for s in shapes]}"
            )
        if self.temperature <= 0 or (self.softcap is not None and self.softcap <= 0):
            raise InputError(
                "temperature and softcap must be positive; got "
                f"{self.temperature} and {self.softcap}"
            )

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.w_q_HDE, self.w_k_GDE, self.w_v_GDF, self.w_o_HFD

    @property
    def slope(self) -> float:
        """Return scale/τ: the largest |dz / d(q·k)|, reached where the cap is idle."""
        scale = self.scale
        scale = 1 / math.sqrt(self.w_q_HDE.shape[-1]) if scale is None else scale
        return scale / self.temperature

    def expanded(self, like: Tensor) -> "Heads":
        """Return G = H heads (keys and values repeated) in ``like``'s dtype, ≥ fp32."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        times = self.w_q_HDE.shape[0] // self.w_k_GDE.shape[0]

        def cast(w: Tensor) -> Tensor:
            return w.to(like.device, dtype)

        def shared(w: Tensor) -> Tensor:
            return cast(w).repeat_interleave(times, 0)

        return replace(
            self,
            w_q_HDE=cast(self.w_q_HDE),
            w_k_GDE=shared(self.w_k_GDE),
            w_v_GDF=shared(self.w_v_GDF),
            w_o_HFD=cast(self.w_o_HFD),
            b_q_HE=None if self.b_q_HE is None else cast(self.b_q_HE),
            b_k_GE=None if self.b_k_GE is None else shared(self.b_k_GE),
            b_v_GF=None if self.b_v_GF is None else shared(self.b_v_GF),
        )


def heads_from_linear(
    *, q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int, kv_heads: int
) -> Heads:
    """Return the heads of four ``nn.Linear`` weights, each stored (out, in)."""

    def split(w: Tensor, count: int) -> Tensor:
        if w.shape[0] % count:
            raise InputError(f"{w.shape[0]} channels do not split into {count} heads")
        return w.reshape(count, -1, w.shape[-1])

    return Heads(
        w_q_HDE=split(q, heads).mT,
        w_k_GDE=split(k, kv_heads).mT,
        w_v_GDF=split(v, kv_heads).mT,
        w_o_HFD=split(o.mT, heads),
    )
