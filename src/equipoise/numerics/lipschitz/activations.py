"""Activations, and the steepest slope each of them has anywhere.

A bound on a feed-forward net that takes 1 for GELU is 13 % too small. The maxima of
GELU's tanh form, SiLU and Mish have no closed form: they are rounded up at 1e-12.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.errors import InputError

Activation = Callable[[Tensor], Tensor]


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
