"""Spectra of an operator on a model's parameters: ends, density, trace.

Is the loss sharper than the step size allows?

Axes, in this file:  N all chosen parameters, flat.
"""

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.model_copy import shallow
from equipoise.anatomy.sites import unwrapped
from equipoise.auditing.curvature.objective import Options
from equipoise.auditing.curvature.operator import Operator, hessian
from equipoise.numerics.spectra.density import Density, spectral_density
from equipoise.numerics.spectra.estimate import Estimate, Search
from equipoise.numerics.spectra.extremes import Extremes, extremes, top_eigenvalues
from equipoise.numerics.spectra.trace import hutch_plus_plus
from equipoise.probes.curvature import StepScale, step_scale

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
    :func:`equipoise.numerics.spectra.extremes.top_eigenvalues`.
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
) -> Extremes:
    """Return both ends with a probability, at one vector of memory per product."""
    start_N = operator.start(seeded())
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
    """Return the generator that every answer here starts from unless one is given."""
    return torch.Generator().manual_seed(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The sharpness that matters to an optimiser, and the largest stable one."""

    value: Estimate
    """λ_max of H for SGD, of P^{-½}HP^{-½} for Adam."""
    threshold: float
    """2/lr, 2(1+β)/lr with momentum, (2+2β₁)/((1−β₁)·lr) for Adam."""
    kind: str
    lr: float

    @property
    def ratio(self) -> float:
        """Return λ/threshold; above 1 the step overshoots along one direction."""
        return self.value.value / self.threshold


def edge_of_stability(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizer,
    *,
    search: Search = LOOSE,
    **options: Unpack[Options],
) -> Edge:
    """Return the (preconditioned) sharpness of a model against its step size.

    Full-batch training hovers at a ratio of 1 (Cohen et al., 2021, 2022); with small
    batches it settles below. Groups with step sizes of their own are put on the scale
    of the largest.

    Example:
        >>> model, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> round(edge_of_stability(model, (x, x), sgd).ratio, 6)
        0.5
    """
    operator = hessian(model, batch, **options)
    scale = scale_of(model, optimizer)
    (value,) = eigenvalues(preconditioned(operator, scale), search=search)
    return Edge(value=value, threshold=scale.threshold, kind=scale.kind, lr=scale.lr)


def scale_of(model: nn.Module, optimizer: Optimizer) -> StepScale:
    """Return D of an optimiser under the names that operators use."""
    body = shallow(unwrapped(model), {})
    return step_scale(optimizer, dict(body.named_parameters()))


def preconditioned(operator: Operator, scale: StepScale) -> Operator:
    """Return D^{½}HD^{½}: the curvature in the coordinates in which a step is even."""
    root_N = torch.cat(
        [
            scale.by_name[name].to(p).sqrt().expand_as(p).reshape(-1)
            for name, p in zip(operator.names, operator.at, strict=True)
        ]
    )

    def matvec(v_N: Tensor) -> Tensor:
        return root_N * operator(root_N * v_N)

    def again(names: Any) -> Operator:
        return preconditioned(operator.again(names), scale)

    return Operator(
        names=operator.names,
        at=operator.at,
        matvec=matvec,
        again=again,
        gradient=lambda: root_N * operator.gradient(),
    )
