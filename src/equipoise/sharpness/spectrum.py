"""Spectra of an operator on a model's parameters: ends, density, trace."""

import torch

from equipoise.numerics.estimate import Estimate
from equipoise.numerics.extremes import Extremes, extremes
from equipoise.numerics.hutchinson import hutch_plus_plus
from equipoise.numerics.quadrature import Density, spectral_density
from equipoise.numerics.restarted import top_eigenvalues
from equipoise.numerics.stopping import Search
from equipoise.sharpness.operator import Operator

LOOSE = Search(tolerance=1e-3, at_most=300)


def eigenvalues(
    operator: Operator,
    count: int = 1,
    *,
    smallest: bool = False,
    search: Search = LOOSE,
    memory: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Estimate, ...]:
    """Return the largest, or the most negative, eigenvalues in bounded memory.

    Each carries its residual and, as ``vector``, where it is attained; see
    :func:`equipoise.numerics.restarted.top_eigenvalues`.
    """
    start_N = operator.start(generator or seeded())
    return top_eigenvalues(
        operator,
        start_N,
        count=min(count, operator.width),
        smallest=smallest,
        search=search,
        memory=memory,
    )


def extreme_eigenvalues(
    operator: Operator,
    *,
    search: Search | None = None,
    generator: torch.Generator | None = None,
) -> Extremes:
    """Return both ends with a probability, at one vector of memory per product."""
    start_N = operator.start(generator or seeded())
    return extremes(operator, start_N, search=search or Search(tolerance=1e-2))


def density(
    operator: Operator,
    *,
    probes: int = 4,
    steps: int = 30,
    generator: torch.Generator | None = None,
) -> Density:
    """Return the spectral density by stochastic Lanczos quadrature."""
    return spectral_density(
        operator,
        operator.width,
        probes=probes,
        steps=steps,
        generator=generator or seeded(),
        dtype=operator.dtype,
    )


def trace(
    operator: Operator, *, probes: int = 30, generator: torch.Generator | None = None
) -> Estimate:
    """Return tr H by Hutch++, with its standard error in ``residual``."""
    return hutch_plus_plus(
        operator,
        operator.width,
        probes=probes,
        generator=generator or seeded(),
        dtype=operator.dtype,
    )


def seeded() -> torch.Generator:
    """Return the generator that every answer here starts from unless told otherwise."""
    return torch.Generator().manual_seed(0)
