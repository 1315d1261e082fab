"""Indicators of the follow-up on risk and selective stabilisation ("v2", BGSS).

Axes, in this file: x batch · H head · N tokens · K key · d head width · D model width.

As the released code computes them, NaN policy excepted: nothing is zeroed here.
ε_mach is the unit roundoff 2^-t. Faults are computed by ``equipoise claims``; the
recommended signal is ``numerics.fragility.head_error``.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.formats import Format

_TINY = 1e-12
SAMPLED_ROWS, ROW_ITERATIONS = 16, 2


def softmax_gain_estimate(p_xK: Float[Tensor, "*x K"]) -> Tensor:
    """Return ‖J(p)‖₂ after 2 power iterations from a centred ramp: reads low."""
    K = p_xK.shape[-1]
    x = torch.linspace(-1, 1, K, dtype=p_xK.dtype, device=p_xK.device).expand_as(p_xK)
    for _ in range(ROW_ITERATIONS):
        y = p_xK * x - p_xK * (p_xK * x).sum(-1, keepdim=True)
        x = y / (y.norm(dim=-1, keepdim=True) + _TINY)
    y = p_xK * x - p_xK * (p_xK * x).sum(-1, keepdim=True)
    norm: Tensor = y.norm(dim=-1)
    return norm


def largest_gain(p_xHNK: Float[Tensor, "*x H N K"]) -> Tensor:
    """Return the largest estimated ‖J‖₂ over heads and 16 evenly spaced rows."""
    N = p_xHNK.shape[-2]
    picked = torch.linspace(0, N - 1, min(N, SAMPLED_ROWS)).round().long()
    return softmax_gain_estimate(p_xHNK[..., picked.to(p_xHNK.device), :]).amax()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionV2:
    """Attention terms of one block; norms are root-sum-squares over heads.

    Single numbers, still on the device: a watched step must not wait for them.
    """

    gain: Tensor
    """max‖J‖₂ as estimated."""
    q: Tensor
    k: Tensor
    s: Tensor
    """‖S‖_F with hidden scores set to 0."""
    p: Tensor
    a: Tensor
    v_spectral: Tensor
    """Largest ‖V‖₂ over heads."""
    head_width: int

    @property
    def kappa_softmax(self) -> Tensor:
        return self.s / self.p * self.gain

    @property
    def chi_score(self) -> Tensor:
        return self.q * self.k / (math.sqrt(self.head_width) * self.p) * self.gain

    @property
    def kappa_val(self) -> Tensor:
        return self.p * self.v_spectral / self.a

    @property
    def magnitude(self) -> Tensor:
        """Return (κ_softmax + χ_score)‖P‖‖V‖₂: no W_O, as published."""
        return (self.kappa_softmax + self.chi_score) * self.p * self.v_spectral


def attention_v2(
    qkv: tuple[
        Float[Tensor, "*x H N d"], Float[Tensor, "*x H K d"], Float[Tensor, "*x H K d"]
    ],
    *,
    visible_NK: Tensor | None = None,
) -> AttentionV2:
    """Return the attention terms of one block from its q, k and v."""
    q, k, v = qkv
    s = q @ k.mT / q.shape[-1] ** 0.5
    hidden = None if visible_NK is None else ~visible_NK
    p = (s if hidden is None else s.masked_fill(hidden, -torch.inf)).softmax(-1)
    s = s if hidden is None else s.masked_fill(hidden, 0.0)
    norms = {n: x.norm() for n, x in zip("qksp", (q, k, s, p), strict=True)}
    return AttentionV2(
        gain=largest_gain(p),
        a=(p @ v).norm(),
        v_spectral=torch.linalg.matrix_norm(v, ord=2).amax(),
        head_width=q.shape[-1],
        **norms,
    )


def layernorm_magnitude(
    x_xD: Float[Tensor, "*x D"], *, eps: float, gain: Tensor | None = None
) -> float:
    """Return ‖γ‖_∞ (ε+2v)/(v+ε)^{3/2} ‖x‖_F with v the mean token variance."""
    v = float(x_xD.var(-1, correction=0).mean())
    top = 1.0 if gain is None else float(gain.abs().amax())
    return top * (eps + 2 * v) / math.sqrt(v + eps) ** 3 * float(x_xD.norm())


def rho_ln(x_xD: Float[Tensor, "*x D"], *, eps: float, format: Format) -> float:
    """Return (σ²/ε)·D·u with σ² the mean token variance."""
    v = float(x_xD.var(-1, correction=0).mean())
    return v / eps * x_xD.shape[-1] * format.unit_roundoff


def transport_surrogate(
    attention: tuple[float, float], mlp: tuple[float, float]
) -> float:
    """Return ρ = a + m(1+a) from (‖branch‖, ‖input‖) of attention and MLP."""
    a, m = (branch / stream for branch, stream in (attention, mlp))
    return a + m * (1 + a)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockV2:
    """What the v2 risk of one block is made of."""

    attention: float
    layernorm: float
    remainder: float
    """‖W_O‖₂‖A‖ + ‖W_fc‖₂‖ln2(x)‖ + ‖W_proj‖₂‖act‖."""
    transport: float
    rho_ln: float = 0.0

    @property
    def magnitude(self) -> float:
        return self.attention + self.layernorm + self.remainder

    @property
    def layernorm_dominance(self) -> float:
        return self.layernorm / self.magnitude


def risks(blocks: list[BlockV2], *, final_norm: float) -> list[float]:
    """Return risk_ℓ = m_ℓ/‖ln_f(x_L)‖ · ∏_{k>ℓ}(1+ρ_k)."""
    later = itertools.accumulate(
        (1 + block.transport for block in reversed(blocks[1:])),
        lambda total, factor: total * factor,
        initial=1.0,
    )
    onward = list(later)[::-1]
    return [b.magnitude / final_norm * t for b, t in zip(blocks, onward, strict=True)]


def bgss_scores(
    blocks: list[BlockV2], *, final_norm: float, format: Format
) -> list[float]:
    """Return u·risk·(1+LN dominance)·(1+ρ_LN), what BGSS ranks layers by."""
    return [
        format.unit_roundoff * risk * (1 + b.layernorm_dominance) * (1 + b.rho_ln)
        for b, risk in zip(blocks, risks(blocks, final_norm=final_norm), strict=True)
    ]
