"""Activations with their first and second derivatives, entry by entry.

The largest |φ''| is exact where a maximiser is known (GELU and SiLU at 0, tanh at
tanh² = 1/3) and rounded up at 1e-12 otherwise.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.theory.lipschitz.feedforward import activation_named


class Derivatives(NamedTuple):
    """φ(z), φ'(z), φ''(z)."""

    value: Tensor
    first: Tensor
    second: Tensor


def _gelu(z: Tensor) -> Derivatives:
    below = 0.5 * torch.erfc(-z / math.sqrt(2))
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return Derivatives(z * below, below + z * density, (2 - z * z) * density)


def _gelu_tanh(z: Tensor) -> Derivatives:
    c, a = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (z + a * z**3))
    inner, bend = c * (1 + 3 * a * z * z), 6 * c * a * z
    slope = 1 - t * t
    first = 0.5 * (1 + t) + 0.5 * z * slope * inner
    second = slope * (inner + 0.5 * z * (bend - 2 * t * inner**2))
    return Derivatives(0.5 * z * (1 + t), first, second)


def _silu(z: Tensor) -> Derivatives:
    s = torch.sigmoid(z)
    second = s * (1 - s) * (2 + z * (1 - 2 * s))
    return Derivatives(z * s, s * (1 + z * (1 - s)), second)


def _tanh(z: Tensor) -> Derivatives:
    t = torch.tanh(z)
    return Derivatives(t, 1 - t * t, -2 * t * (1 - t * t))


def _relu(z: Tensor) -> Derivatives:
    # Almost everywhere; at a kink autograd takes slope 0, and so do we.
    return Derivatives(torch.relu(z), (z > 0).to(z.dtype), torch.zeros_like(z))


def _identity(z: Tensor) -> Derivatives:
    return Derivatives(z, torch.ones_like(z), torch.zeros_like(z))


_DERIVATIVES: dict[str, tuple[Callable[[Tensor], Derivatives], float]] = {
    "gelu": (_gelu, math.sqrt(2 / math.pi)),
    "gelu_tanh": (_gelu_tanh, math.sqrt(2 / math.pi)),
    "identity": (_identity, 0.0),
    "relu": (_relu, 0.0),
    "silu": (_silu, 0.5),
    "tanh": (_tanh, 4 / (3 * math.sqrt(3))),
}
CURVED = tuple(_DERIVATIVES)


def derivatives(name: str, z: Tensor) -> Derivatives:
    """Return φ, φ' and φ'' of a named activation.

    Example:
        >>> round(float(derivatives("silu", torch.tensor(0.0)).second), 6)
        0.5
    """
    return _known(name)[0](z)


def steepest_slope(name: str) -> float:
    """Return max |φ'|."""
    return activation_named(name)[1]


def sharpest_bend(name: str) -> float:
    """Return max |φ''| (for ReLU, of the smooth pieces: zero)."""
    return _known(name)[1]


def _known(name: str) -> tuple[Callable[[Tensor], Derivatives], float]:
    if name not in _DERIVATIVES:
        known = ", ".join(CURVED)
        raise InputError(f"no second derivative of {name!r} is known; known: {known}")
    return _DERIVATIVES[name]
