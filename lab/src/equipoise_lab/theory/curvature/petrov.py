"""Petrov et al. (2025): their bounds on the Hessian of a layer, as stated.

Axes, in this file:  L token · D model width · E key width · M hidden width.

Single head, no mask, loss ‖output − target‖²/(L·D), spectral norms throughout. Both are
wrong as stated (``equipoise_lab.claims.petrov_attention`` and ``petrov_block``) and are
here to be compared with.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.theory.curvature.norm import norm_curvature_unfolded


@dataclass(frozen=True, slots=True, kw_only=True)
class PetrovLayer:
    """One attention layer in their setting: F = softmax(X W_Q W_Kᵀ Xᵀ/√d_K) X W_V."""

    x_LD: Tensor
    w_q_DE: Tensor
    w_k_DE: Tensor
    w_v_DD: Tensor
    target_LD: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        return *self.x_LD.shape, self.w_q_DE.shape[1]

    @property
    def norms(self) -> tuple[float, float, float, float]:
        """Return ‖X‖, ‖W_Q‖, ‖W_K‖ and ‖W_V‖."""
        x, q, k, v = map(two, (self.x_LD, self.w_q_DE, self.w_k_DE, self.w_v_DD))
        return x, q, k, v

    @property
    def output(self) -> Tensor:
        scores = self.x_LD @ self.w_q_DE @ self.w_k_DE.mT @ self.x_LD.mT
        rows = (scores / math.sqrt(self.sizes[2])).softmax(-1)
        return rows @ self.x_LD @ self.w_v_DD


def two(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, ord=2))


def petrov_attention_blocks(layer: PetrovLayer) -> dict[str, float]:
    """Return the four entries of their Theorem 1 (main text); KK and VK have none."""
    (L, D, E), (x, q, k, v) = layer.sizes, layer.norms
    off = math.sqrt(min(L, D)) * (L * x * v + two(layer.target_LD))
    qk = 3 * L * k * q * x**5 + D / L * x**3
    return {
        "VV": 2 * L * x**2 / D,
        "QQ": 8 * k**2 * v**2 * x**6 / (L**3 * D * E)
        + 12 * off * v * k**2 * x**5 / (D * E),
        "VQ": 4 * v * k * x**4 / (L * D * math.sqrt(E))
        + 4 * off * k * x**3 / (L**2 * math.sqrt(E)),
        "QK": 8 * k * q * v**2 * x**6 / (L**3 * D * E)
        + 4 * off * v * qk / (L * D * math.sqrt(E)),
    }


def petrov_attention_bound(layer: PetrovLayer) -> float:
    """Return M of Theorem 1: three times the largest of four entries."""
    return 3 * max(petrov_attention_blocks(layer).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PetrovBlock:
    """One post-norm block in their setting: LN(Y + relu(Y W_1) W_2), Y = LN(X + F)."""

    attention: PetrovLayer
    w_1_DM: Tensor
    w_2_MD: Tensor

    @property
    def stream(self) -> tuple[Tensor, Tensor]:
        """Return what the first and the second norm read."""
        first = self.attention.x_LD + self.attention.output
        y = layer_norm(first)
        return first, y + (y @ self.w_1_DM).relu() @ self.w_2_MD


def layer_norm(x: Tensor) -> Tensor:
    """Return LayerNorm with γ = 1, β = 0 and ε = 0, composed."""
    m = x - x.mean(-1, keepdim=True)
    return m / m.square().mean(-1, keepdim=True).sqrt()


def petrov_block_bound(block: PetrovBlock) -> float:
    """Return the bound of Theorem 6: five times the largest entry.

    Norms of the two LayerNorms are their true ones, which favours the bound: the lemma
    they come from is false as printed. Nothing is printed for W_K: its entries are
    those of W_Q with W_K and W_Q exchanged.
    """
    layer, (first, second) = block.attention, block.stream
    (L, D, _), out = layer.sizes, layer_norm(second)
    j_y, h_y = _norms(first)
    j_z, h_z = _norms(second)
    w_1, w_2 = two(block.w_1_DM), two(block.w_2_MD)
    y, hidden = layer_norm(first), (layer_norm(first) @ block.w_1_DM).relu()
    j_sy = 1 + w_1 * w_2
    g, phi = _first(layer), _second(layer)
    b = {"1": w_2 * two(y), "2": two(hidden)} | {n: j_sy * j_y * g[n] for n in g}
    xi = {("1", "2"): math.sqrt(D) * two(y)}
    for n in g:
        xi["1", n] = math.sqrt(block.w_1_DM.shape[1]) * w_2 * j_y * g[n]
        xi["2", n] = math.sqrt(D) * w_1 * j_y * g[n]
    for (m, n), bend in phi.items():
        xi[m, n] = j_sy * (g[m] * h_y * g[n] + j_y * bend)
    slope = 2 / (L * D) * float((out - layer.target_LD).norm())
    pairs = [*xi, ("1", "1"), ("2", "2")]
    return 5 * max(
        2 / (L * D) * j_z**2 * b[m] * b[n]
        + slope * (j_z * xi.get((m, n), 0.0) + b[m] * h_z * b[n])
        for m, n in pairs
    )


def _norms(x_LD: Tensor) -> tuple[float, float]:
    """Return ‖J‖ and ‖H‖ of LayerNorm at ε = 0, the worst row's."""
    std = x_LD.std(-1, correction=0)
    return float(1 / std.min()), float(norm_curvature_unfolded(x_LD, eps=0.0).max())


def _first(layer: PetrovLayer) -> dict[str, float]:
    (L, _, E), (x, q, k, v) = layer.sizes, layer.norms
    each = v * x**3 / (L * math.sqrt(E))
    return {"V": L * x, "Q": each * k, "K": each * q}


def _second(layer: PetrovLayer) -> dict[tuple[str, str], float]:
    """Return ‖Φ‖: the second terms of Theorem 1 without loss and residual."""
    (L, D, E), (x, q, k, v) = layer.sizes, layer.norms
    root = math.sqrt(E)
    qk = 3 * L * k * q * x**5 + D / L * x**3
    return {
        ("Q", "Q"): 6 * L * v * k**2 * x**5 / E,
        ("K", "K"): 6 * L * v * q**2 * x**5 / E,
        ("V", "Q"): 2 * D * k * x**3 / (L * root),
        ("V", "K"): 2 * D * q * x**3 / (L * root),
        ("Q", "K"): 2 * v * qk / root,
        ("V", "V"): 0.0,
    }
