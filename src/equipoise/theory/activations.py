"""Activation functions: their largest slope, and first and second derivatives.

A bound on a feed-forward net that takes 1 for GELU's slope is 13 % too small. The
maxima of GELU's tanh form, SiLU and Mish have no closed form: they are rounded up at
1e-12.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.errors import InputError

Activation = Callable[[Tensor], Tensor]


class Derivatives(NamedTuple):
    """φ(z), φ'(z), φ''(z)."""

    value: Tensor
    first: Tensor
    second: Tensor


def _quick_gelu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(1.702 * z)


def _gelu_tanh(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


def _relu_squared(z: Tensor) -> Tensor:
    return F.relu(z).square()


_SILU = 1.099839320129
# x = √2: Φ(√2) + √2·φ(√2)
_GELU = 0.5 * (1 + math.erf(1)) + 1 / (math.e * math.sqrt(math.pi))

ACTIVATIONS: dict[str, tuple[Activation, float]] = {
    "elu": (F.elu, 1.0),
    "gelu": (F.gelu, _GELU),
    "gelu_tanh": (_gelu_tanh, 1.128993068659),
    "hardswish": (F.hardswish, 1.5),
    "identity": (torch.clone, 1.0),
    "leaky_relu": (F.leaky_relu, 1.0),
    "mish": (F.mish, 1.088498161252),
    "quick_gelu": (_quick_gelu, _SILU),
    "relu": (F.relu, 1.0),
    "relu_squared": (_relu_squared, math.inf),
    "sigmoid": (torch.sigmoid, 0.25),
    "silu": (F.silu, _SILU),
    "softplus": (F.softplus, 1.0),
    "tanh": (torch.tanh, 1.0),
}
"""Name → the function, and max |φ'|."""


def activation_named(name: str) -> tuple[Activation, float]:
    """Return the function and max |slope| of an activation.

    Example:
        >>> round(activation_named("gelu")[1], 6)
        1.128904
    """
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise InputError(f"no activation {name!r}; known: {known}")
    return ACTIVATIONS[name]


def slopes(activation: Activation, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return φ(z) and φ'(z), entry by entry."""
    forward = torch.func.jvp(activation, (z,), (torch.ones_like(z),))
    return forward[0], forward[1]


def _gelu_derivatives(z: Tensor) -> Derivatives:
    below = 0.5 * torch.erfc(-z / math.sqrt(2))
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return Derivatives(z * below, below + z * density, (2 - z * z) * density)


def _gelu_tanh_derivatives(z: Tensor) -> Derivatives:
    c, a = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (z + a * z**3))
    inner, bend = c * (1 + 3 * a * z * z), 6 * c * a * z
    slope = 1 - t * t
    first = 0.5 * (1 + t) + 0.5 * z * slope * inner
    second = slope * (inner + 0.5 * z * (bend - 2 * t * inner**2))
    return Derivatives(0.5 * z * (1 + t), first, second)


def _silu_derivatives(z: Tensor) -> Derivatives:
    s = torch.sigmoid(z)
    second = s * (1 - s) * (2 + z * (1 - 2 * s))
    return Derivatives(z * s, s * (1 + z * (1 - s)), second)


def _tanh_derivatives(z: Tensor) -> Derivatives:
    t = torch.tanh(z)
    return Derivatives(t, 1 - t * t, -2 * t * (1 - t * t))


def _relu_derivatives(z: Tensor) -> Derivatives:
    # Almost everywhere; at a kink autograd takes slope 0, and so do we.
    return Derivatives(torch.relu(z), (z > 0).to(z.dtype), torch.zeros_like(z))


def _identity_derivatives(z: Tensor) -> Derivatives:
    return Derivatives(z, torch.ones_like(z), torch.zeros_like(z))


_DERIVATIVES: dict[str, Callable[[Tensor], Derivatives]] = {
    "gelu": _gelu_derivatives,
    "gelu_tanh": _gelu_tanh_derivatives,
    "identity": _identity_derivatives,
    "relu": _relu_derivatives,
    "silu": _silu_derivatives,
    "tanh": _tanh_derivatives,
}
CURVED = tuple(_DERIVATIVES)


def derivatives(name: str, z: Tensor) -> Derivatives:
    """Return φ, φ' and φ'' of a named activation.

    Example:
        >>> round(float(derivatives("silu", torch.tensor(0.0)).second), 6)
        0.5
    """
    if name not in _DERIVATIVES:
        known = ", ".join(CURVED)
        raise InputError(f"no second derivative of {name!r} is known; known: {known}")
    return _DERIVATIVES[name](z)
