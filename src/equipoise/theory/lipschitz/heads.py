"""Attention heads as tensors: weights and scale, rotary positions, QK-norm.

Axes, in this file:  H query head · G key/value head (G divides H) · D model width ·
E width of queries and keys · F width of values · L position · R rotated channels ·
x any leading axes.  Row vectors: q = x W_Q + b_Q.

Rotation and QK-norm come with their transposes: bounds carry directions of queries and
keys back to the input.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """n(u) = γ ⊙ u / r(u), with r² = mean(u²) + ε: RMSNorm, or LayerNorm if centred.

    Normalising to unit length is RMSNorm with γ = 1/√E. A norm over all heads at once
    (OLMo 2) mixes heads and is another function: do not describe it with this one.
    """

    gain_E: Tensor | None = None
    eps: float = 0.0
    centred: bool = False

    def normalised(self, u_xE: Float[Tensor, "*x E"]) -> Tensor:
        u_xE = self._centre(u_xE)
        return self._gained(u_xE / self._radius(u_xE))

    def pulled(self, g_xE: Tensor, raw_xE: Tensor) -> Tensor:
        """Return Jᵀg for the Jacobian at the raw vector u, both broadcast:

        Jᵀg = C (γ⊙g − u (u·(γ⊙g)) / (E r²)) / r,      C the centring (or the identity).
        """
        raw_xE = self._centre(raw_xE)
        r_x1, g_xE = self._radius(raw_xE), self._gained(g_xE)
        along_x1 = (raw_xE * g_xE).mean(-1, keepdim=True) / r_x1.square()
        return self._centre((g_xE - raw_xE * along_x1) / r_x1)

    def _centre(self, u_xE: Tensor) -> Tensor:
        return u_xE - u_xE.mean(-1, keepdim=True) if self.centred else u_xE

    def _radius(self, u_xE: Tensor) -> Tensor:
        return (u_xE.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def _gained(self, u_xE: Tensor) -> Tensor:
        return u_xE if self.gain_E is None else u_xE * self.gain_E.to(u_xE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotate the first R channels of position l by angles given as cos and sin.

    The tables are used as they are: a scaled rotation (YaRN) stays scaled.
    """

    cos_LR: Tensor
    sin_LR: Tensor
    interleaved: bool = False
    """Pairs are neighbours (GPT-J); otherwise e pairs with e + R/2 (NeoX, HF)."""

    def __post_init__(self) -> None:
        if self.cos_LR.shape != self.sin_LR.shape or self.cos_LR.shape[-1] % 2:
            raise InputError(
                "rotary: cos and sin must share one shape (positions, even width); "
                f"got {tuple(self.cos_LR.shape)} and {tuple(self.sin_LR.shape)}"
            )

    def rotate(self, u_xLE: Float[Tensor, "*x L E"], at_L: Tensor) -> Tensor:
        """Return R_l u for the vector at each position."""
        return self._map(u_xLE, at_L, transpose=False)

    def rotate_back(self, u_xLE: Float[Tensor, "*x L E"], at_L: Tensor) -> Tensor:
        """Return R_lᵀ u: what a change of the rotated vector means before rotation."""
        return self._map(u_xLE, at_L, transpose=True)

    def _map(self, u_xLE: Tensor, at_L: Tensor, *, transpose: bool) -> Tensor:
        cos_LR, sin_LR = (t[at_L].to(u_xLE) for t in (self.cos_LR, self.sin_LR))
        width = cos_LR.shape[-1]
        u_xLR, rest = u_xLE[..., :width], u_xLE[..., width:]
        if transpose:  # (diag(cos) + diag(sin) S)ᵀ = diag(cos) - S diag(sin)
            v_xLR = u_xLR * cos_LR - self._swap(u_xLR * sin_LR)
        else:
            v_xLR = u_xLR * cos_LR + self._swap(u_xLR) * sin_LR
        rest = rest.expand(*v_xLR.shape[:-1], rest.shape[-1])
        return torch.cat([v_xLR, rest], -1)

    def _swap(self, u_xR: Tensor) -> Tensor:
        """Return S u with Sᵀ = -S: each pair (a, b) becomes (-b, a)."""
        if self.interleaved:
            a, b = u_xR[..., ::2], u_xR[..., 1::2]
            return torch.stack([-b, a], -1).flatten(-2)
        a, b = u_xR.chunk(2, -1)
        return torch.cat([-b, a], -1)


def rotary(length: int, width: int, *, interleaved: bool = False) -> Rotary:
    """Return the usual tables: position l turns pair r by the angle l·10⁴^(−2r/width).

    Example:
        >>> rotary(2, 4).cos_LR[0]
        tensor([1., 1., 1., 1.], dtype=torch.float64)
    """
    rate = 1e4 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    rate = rate.repeat_interleave(2) if interleaved else rate.repeat(2)
    angle_LR = torch.arange(length, dtype=torch.float64)[:, None] * rate
    return Rotary(cos_LR=angle_LR.cos(), sin_LR=angle_LR.sin(), interleaved=interleaved)


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
