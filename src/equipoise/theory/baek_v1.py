"""Indicators of Baek (arXiv 2510.21770, "v1") as its released code computes them.

Axes, in this file: x batch and heads · N tokens · K key · d head width · D model width.

Kept so that published numbers can be compared on equal data. Their faults are computed
by ``equipoise claims``; what to use instead is in ``numerics.fragility`` and
``theory.fragility_bounds``. Two things are not copied: NaN is not turned into 0, and
the caller's generator draws the samples. ε_mach is the spacing 2^(1-t) here.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.formats import Format

_TINY = 1e-12
SAMPLED_MATRICES, SAMPLED_ROWS, ITERATIONS = 64, 256, 7
VALUE_RIDGE, WEIGHT_RIDGE = 3e-6, 1e-6


def kappa_score(
    q_xNd: Float[Tensor, "*x N d"],
    k_xNd: Float[Tensor, "*x N d"],
    *,
    generator: torch.Generator,
) -> Tensor:
    """Return max ‖Q‖₂‖K‖₂/(√d‖S‖₂) over a sample of heads, by power iteration."""
    q, k = _sample(generator, SAMPLED_MATRICES, _matrices(q_xNd), _matrices(k_xNd))
    root = math.sqrt(q.shape[-1])
    top = _power_norm(q, generator) * _power_norm(k, generator) / root
    return (top / (_power_norm(q @ k.mT / root, generator) + _TINY)).amax()


def kappa_softmax(
    s_xNK: Float[Tensor, "*x N K"], *, generator: torch.Generator
) -> Tensor:
    """Return max ‖J(pᵢ)‖₂‖sᵢ‖/‖pᵢ‖ over a sample of rows: a row-wise diagnostic.

    Hidden keys (-inf) do not count towards ‖sᵢ‖; the paper's models have none.
    """
    (s,) = _sample(generator, SAMPLED_ROWS, s_xNK.reshape(-1, s_xNK.shape[-1]))
    p = s.softmax(-1)
    size = s.masked_fill(s == -math.inf, 0.0).square().sum(-1)
    ratio = (size / p.square().sum(-1)).sqrt()
    return (softmax_gain_estimate(p, generator=generator) * ratio).amax()


def softmax_gain_estimate(
    p_xK: Float[Tensor, "*x K"], *, generator: torch.Generator
) -> Tensor:
    """Return ‖J(p)‖₂ after 7 power iterations from a random start: reads low."""
    x = _unit(_normal(p_xK.shape, p_xK, generator))
    for _ in range(ITERATIONS):
        x = _unit(_softmax_jacobian(p_xK, x))
    return (x * _softmax_jacobian(p_xK, x)).sum(-1)


def kappa_value(
    v_xNd: Float[Tensor, "*x N d"], *, generator: torch.Generator
) -> Tensor:
    """Return max σ₁/(σ_min + ridge) of V over a sample of heads."""
    (v,) = _sample(generator, SAMPLED_MATRICES, _matrices(v_xNd))
    return _condition(v, VALUE_RIDGE).amax()


def kappa_eff(*weights: Float[Tensor, "a b"]) -> Tensor:
    """Return the sum of condition numbers of a block's MLP and output weights."""
    return torch.stack([_condition(w, WEIGHT_RIDGE) for w in weights]).sum()


def c_ln(x_xD: Float[Tensor, "*x D"], *, eps: float) -> Tensor:
    """Return σ/√ε + σ²/ε + 1 with σ² the median token variance."""
    v = _median_variance(x_xD)
    return v.sqrt() / math.sqrt(eps) + v / eps + 1


def rho_ln(x_xD: Float[Tensor, "*x D"], *, eps: float, format: Format) -> Tensor:
    """Return (σ²/ε)·D·ε_mach with σ² the median token variance."""
    return _median_variance(x_xD) / eps * x_xD.shape[-1] * format.spacing


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockV1:
    """What the v1 predictor of one block is made of."""

    kappa_softmax: float
    kappa_score: float
    kappa_value: float
    output_norm: float
    """‖W_O‖₂."""
    kappa_eff: float
    c_ln: float

    @property
    def attention(self) -> float:
        gain = self.kappa_softmax * (1 + self.kappa_score)
        return gain * self.kappa_value * self.output_norm

    @property
    def predictor(self) -> float:
        """Return κ_softmax(1+κ_score)κ(V)‖W_O‖₂ + κ_eff + C_LN."""
        return self.attention + self.kappa_eff + self.c_ln


def predicted_error(blocks: list[BlockV1], format: Format) -> float:
    """Return ε_mach·Σ R_ℓ, the published prediction of relative error."""
    return format.spacing * sum(block.predictor for block in blocks)


def _sample(
    generator: torch.Generator, count: int, *tensors: Tensor
) -> tuple[Tensor, ...]:
    drawn = torch.randperm(tensors[0].shape[0], generator=generator)[:count]
    return tuple(x[drawn.to(x.device)] for x in tensors)


def _normal(shape: torch.Size, like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True).sqrt() + _TINY)


def _softmax_jacobian(p: Tensor, x: Tensor) -> Tensor:
    return p * x - p * (p * x).sum(-1, keepdim=True)


def _power_norm(m_xab: Tensor, generator: torch.Generator) -> Tensor:
    x = _unit(_normal(m_xab[..., 0, :].shape, m_xab, generator))
    for _ in range(ITERATIONS):
        x = _unit((m_xab.mT @ (m_xab @ x[..., None]))[..., 0])
    return (m_xab @ x[..., None])[..., 0].square().sum(-1).sqrt()


def _condition(m_xab: Tensor, ridge: float) -> Tensor:
    sigma = torch.linalg.svdvals(m_xab)
    ratio: Tensor = sigma[..., 0] / (sigma[..., -1] + ridge)
    return ratio


def _matrices(x_xNd: Tensor) -> Tensor:
    return x_xNd.reshape(-1, *x_xNd.shape[-2:])


def _median_variance(x_xD: Tensor) -> Tensor:
    return x_xD.var(-1, correction=0).median()
