"""Slow, obvious versions: definitions solved by bisection, every sign tried."""

import itertools

import torch
from torch import Tensor


def entmax_row(z_K: Tensor, alpha: float) -> Tensor:
    """Return α-entmax of one row by bisection on its threshold, in float64."""
    z = z_K.double() * (alpha - 1)
    low, high = z.max() - 1, z.max()
    for _ in range(200):
        middle = (low + high) / 2
        mass = (z - middle).clamp_min(0).pow(1 / (alpha - 1)).sum()
        low, high = (middle, high) if mass > 1 else (low, middle)
    return (z - low).clamp_min(0).pow(1 / (alpha - 1))


def infinity_to_one(matrix_KK: Tensor) -> float:
    """Return max over all signs s of ‖J s‖₁."""
    K = matrix_KK.shape[0]
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=K))).double()
    return float((signs @ matrix_KK.double().T).abs().sum(-1).max())


def _self_adjusted(z: Tensor) -> Tensor:
    return z * z.softmax(-1)


def _safe_self_adjusted(z: Tensor) -> Tensor:
    low = z.amin(-1, keepdim=True).clamp_max(0)
    high = z.amax(-1, keepdim=True).clamp_min(0)
    return (z - low + 1) / (high - low + 1) * z.softmax(-1)


def _softpick(z: Tensor) -> Tensor:
    rise = torch.exp(z) - 1
    return rise.clamp_min(0) / (rise.abs().sum(-1, keepdim=True) + 1e-6)


# The published formulas as they stand, left to autograd, in float64.
FORMULAS = {
    "self-adjusted": _self_adjusted,
    "self-adjusted-safe": _safe_self_adjusted,
    "softpick": _softpick,
}
