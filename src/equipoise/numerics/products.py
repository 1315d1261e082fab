"""A product of matrices as an operator: checked, oriented, scaled, never formed.

Axes, in this file:  M rows · N columns · R inner width.
"""

import math
from functools import partial

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.gram import Step, matrix_step, operator_step

# Up to this width a dense decomposition is cheaper than iterating.
DENSE = 128


class Product:
    """A·B·… or its transpose, whichever maps from the smaller space."""

    def __init__(self, factors: tuple[Tensor, ...]) -> None:
        factors = _common(_checked(factors))
        wide = factors[0].shape[0] < factors[-1].shape[1]
        self.factors = (
            tuple(factor.mT for factor in reversed(factors)) if wide else factors
        )
        self.measured = self.thinnest <= DENSE
        """Whether every entry has been looked at, or only some rows."""
        look = _exponent if self.measured else _glance
        self.exponents = [look(factor) for factor in self.factors]

    def measure(self) -> None:
        """Look at every entry, when a glance has misled."""
        self.exponents = [_exponent(factor) for factor in self.factors]
        self.measured = True

    @property
    def finite(self) -> bool:
        return not any(map(math.isnan, self.exponents))

    @property
    def zero(self) -> bool:
        return -math.inf in self.exponents

    @property
    def last(self) -> Tensor:
        """Return the factor whose columns are the domain."""
        return self.factors[-1]

    @property
    def thinnest(self) -> int:
        return min(min(factor.shape) for factor in self.factors)

    @property
    def scale(self) -> float:
        return math.ldexp(1.0, int(sum(self.exponents)))

    def step(self) -> Step:
        """Return a Lanczos step of PᵀP, for the product divided by ``scale``.

        Powers of two round nothing, and without them σ² of a float32 matrix leaves
        the format from 1e19 upwards and from 1e-23 downwards.
        """
        units = [math.ldexp(1.0, int(e)) for e in self.exponents]
        if len(self.factors) == 1:
            return matrix_step(self.last, units[0])
        return operator_step(
            partial(_chain, list(zip(self.factors, units, strict=True)))
        )

    def compressed(self) -> Tensor:
        """Return a small float64 matrix with the same non-zero singular values.

        A = Q₁R₁ and Bᵀ = Q₂R₂ give ‖AB‖₂ = ‖R₁R₂ᵀ‖₂: nothing is squared, so no digit
        is lost beyond those of the product itself.
        """
        first, *rest = [factor.double() for factor in self.factors]
        if not rest:
            return first
        (second,) = rest
        return _triangle(first) @ _triangle(second.mT).mT


def _chain(pairs: list[tuple[Tensor, float]], x_N: Tensor) -> Tensor:
    for factor, unit in reversed(pairs):
        x_N = (factor @ x_N) / unit
    for factor, unit in pairs:
        x_N = (factor.mT @ x_N) / unit
    return x_N


def _triangle(tall_MR: Tensor) -> Tensor:
    if tall_MR.shape[0] <= tall_MR.shape[1]:
        return tall_MR
    triangle: Tensor = torch.linalg.qr(tall_MR, mode="r").R
    return triangle


def _checked(factors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not factors:
        raise InputError("spectral_norm needs at least one matrix")
    for factor in factors:
        if factor.ndim != 2 or 0 in factor.shape:
            shape = tuple(factor.shape)
            raise InputError(
                f"spectral_norm takes matrices with entries, got shape {shape}; "
                "for a stack use spectral_norms"
            )
        if not factor.dtype.is_floating_point:
            raise InputError(f"spectral_norm takes real floats, got {factor.dtype}")
    if any(a.shape[1] != b.shape[0] for a, b in zip(factors, factors[1:])):  # noqa: B905
        shapes = " · ".join(str(tuple(factor.shape)) for factor in factors)
        raise InputError(f"spectral_norm: these do not multiply: {shapes}")
    return factors


def _common(factors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dtype = torch.float32
    for factor in factors:
        dtype = torch.promote_types(dtype, factor.dtype)
    return tuple(factor.detach().to(dtype) for factor in factors)


def _glance(factor: Tensor) -> float:
    """Return the exponent of a few rows, which needs no pass over the matrix.

    A NaN elsewhere comes out of the first product, and so does an entry so much larger
    that its square overflows; both lead to ``Product.measure``.
    """
    glanced = _exponent(factor[:: max(1, factor.shape[0] // 8)])
    return glanced if math.isfinite(glanced) else _exponent(factor)


def _exponent(factor: Tensor) -> float:
    """Return the power of two above every entry: −∞ for zero, NaN if not finite.

    Not below −126: the inverse of a smaller one is not a float32.
    """
    low, high = factor.aminmax()
    largest = float(torch.maximum(-low, high))
    if not math.isfinite(largest):
        return math.nan
    return max(math.frexp(largest)[1], -126) if largest > 0 else -math.inf
