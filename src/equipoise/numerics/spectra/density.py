"""The density of a spectrum from a few Krylov spaces: stochastic Lanczos quadrature.

Axes, in this file:  N width of the operator · V probe · M node · G point of a curve.

A unit start q makes (θ, τ²) of its tridiagonal matrix a Gauss rule: Σ τ²·θ^p = qᵀA^p q
for every p ≤ 2m−1. The mean over random starts is the spectral density in the weak
sense: (1/N) Σ f(λ) ≈ mean Σ τ² f(θ) (Ubaru, Chen and Saad, 2017).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.spectra.lanczos import Krylov, Matvec, Small, operator_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Density:
    """Nodes and weights of each probe; weights of a probe sum to 1."""

    nodes: tuple[Small, ...]
    weights: tuple[Small, ...]
    width: int
    products: int

    def mean(self, power: int) -> tuple[float, float]:
        """Return the mean of λ^power over the spectrum, and its standard error."""
        each_V = [
            float((w * t**power).sum())
            for t, w in zip(self.nodes, self.weights, strict=True)
        ]
        return float(np.mean(each_V)), _standard_error(each_V)

    def below(self, at: float) -> tuple[float, float]:
        """Return the share of eigenvalues below a point, and its standard error."""
        each_V = [
            float(w[t < at].sum())
            for t, w in zip(self.nodes, self.weights, strict=True)
        ]
        return float(np.mean(each_V)), _standard_error(each_V)

    def curve(self, at_G: Small, *, bandwidth: float) -> Small:
        """Return the density smeared by a Gaussian: Σ τ²·N(t; θ, bandwidth²)."""
        if not bandwidth > 0:
            raise InputError(f"bandwidth {bandwidth}: give a positive number")
        total_G = np.zeros_like(at_G, dtype=np.float64)
        for t, w in zip(self.nodes, self.weights, strict=True):
            bell_GM = np.exp(-0.5 * ((at_G[:, None] - t) / bandwidth) ** 2)
            total_G += bell_GM @ w
        found: Small = total_G / (len(self.nodes) * bandwidth * math.sqrt(2 * math.pi))
        return found


def spectral_density(
    matvec: Matvec,
    width: int,
    *,
    probes: int = 4,
    steps: int = 40,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Density:
    """Return the spectral density of a symmetric operator, probes × steps products.

    The Krylov spaces are fully reorthogonalised: a ghost would be counted twice.

    Example:
        >>> rng, d = torch.Generator().manual_seed(0), torch.tensor([1.0, 1.0, 4.0])
        >>> found = spectral_density(lambda x: d * x, 3, probes=2, generator=rng)
        >>> round(found.mean(0)[0], 6)
        1.0
    """
    if probes < 2:
        raise InputError(f"probes {probes}: a standard error needs at least 2")
    if steps < 1:
        raise InputError(f"steps {steps}: at least one is needed")
    rules = [
        _rule(matvec, _start(width, generator, dtype), steps) for _ in range(probes)
    ]
    return Density(
        nodes=tuple(nodes for nodes, _ in rules),
        weights=tuple(weights for _, weights in rules),
        width=width,
        products=sum(len(nodes) for nodes, _ in rules),
    )


def _start(width: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(width, generator=generator, device=generator.device).to(dtype)


def _rule(
    matvec: Matvec, start_N: Float[Tensor, "N"], steps: int
) -> tuple[Small, Small]:
    krylov = Krylov(operator_step(matvec), start_N, at_most=steps)
    while krylov.steps < krylov.at_most:
        krylov.grow()
        if not krylov.finite:
            return np.array([math.nan]), np.array([1.0])
        if krylov.closed:
            break
    values_M, weights_MM = krylov.ritz()
    return values_M, weights_MM[0] ** 2


def _standard_error(each_V: list[float]) -> float:
    return float(np.std(each_V, ddof=1) / math.sqrt(len(each_V)))
