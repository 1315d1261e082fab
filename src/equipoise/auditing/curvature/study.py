"""The study behind ``equipoise curvature``: how sharp a loss is, and because of what.

Axes, in this file:  N all trainable parameters, flat.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.auditing.curvature.attribution import (
    Attribution,
    attributed,
    sublayer,
    trace_attributed,
)
from equipoise.auditing.curvature.objective import Options
from equipoise.auditing.curvature.operator import Operator, hessian
from equipoise.auditing.curvature.spectrum import (
    Edge,
    density,
    eigenvalues,
    preconditioned,
    scale_of,
    seeded,
    trace,
)
from equipoise.numerics.spectra.density import Density
from equipoise.numerics.spectra.estimate import Estimate, Search
from equipoise.records import html_table

COARSE = Search(tolerance=1e-2, at_most=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvatureRow:
    """One sublayer's part in curvature; parts add up, and may be negative."""

    site: str
    trace: float
    top: float
    update: float
    """Of vᵀHv along the next step: minus the gradient, or what the optimiser makes."""
    sharpness: float | None
    """λ_max of the block of its own parameters; None when not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvatureStudy:
    """A model's curvature: how sharp, which way, and because of what."""

    model: str
    parameters: int
    gradient: float
    """Norm."""
    top: tuple[Estimate, ...]
    bottom: Estimate
    trace: Estimate
    density: Density
    rows: tuple[CurvatureRow, ...]
    """In the order of the network; values, not shares."""
    kinds: dict[str, tuple[float, float, float]]
    """Kind of operation → its part of trace, of the top and along the step."""
    totals: tuple[float, float, float]
    residual: float
    """The largest relative gap between a sum of parts and its total."""
    edge: Edge | None

    def __repr__(self) -> str:
        top = f"sharpness {self.top[0]!r}" if self.top else "no eigenvalue"
        return f"CurvatureStudy({self.model}, {self.parameters} parameters: {top})"

    def _repr_html_(self) -> str:
        head = ("sublayer", "of tr H", "of λ₁", "along the step")
        rows = [
            (r.site, *(f"{x:.3g}" for x in (r.trace, r.top, r.update)))
            for r in self.rows
        ]
        return html_table(repr(self), [head, *rows])


def study(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Optimizer | None = None,
    count: int = 5,
    probes: int = 4,
    steps: int = 25,
    every_block: bool = False,
    **options: Unpack[Options],
) -> CurvatureStudy:
    """Return the spectrum of a model's Hessian and who makes it.

    Args:
        model, batch, options: As for :func:`..curvature.hessian`.
        optimizer: For the edge of stability and the direction of the next step.
        count: Largest eigenvalues to find.
        probes: Random vectors, for the density, and for the attribution of the trace.
        steps: Of each Krylov space of the density: as many vectors are held.
        every_block: Also the sharpness of each sublayer's own block: slow.
    """
    operator = hessian(model, batch, **options)
    top = eigenvalues(operator, count, search=COARSE)
    (bottom,) = eigenvalues(operator, smallest=True, search=COARSE)
    slope_N = operator.gradient()
    assert top[0].vector is not None
    parts = (
        trace_attributed(model, batch, probes=probes, generator=seeded(), **options),
        attributed(model, batch, operator.split(top[0].vector), **options),
        attributed(model, batch, _step(operator, slope_N, model, optimizer), **options),
    )
    return CurvatureStudy(
        model=type(model).__name__,
        parameters=operator.width,
        gradient=float(slope_N.norm()),
        top=top,
        bottom=bottom,
        trace=trace(operator, probes=max(6, 3 * probes)),
        density=density(operator, probes=max(2, probes), steps=steps),
        rows=_rows(parts, operator if every_block else None),
        kinds=_joined([part.by_kind() for part in parts]),
        totals=_three([part.total for part in parts]),
        residual=max(part.residual / max(abs(part.total), 1e-30) for part in parts),
        edge=None if optimizer is None else _edge(operator, top[0], model, optimizer),
    )


def _edge(
    operator: Operator, first: Estimate, model: nn.Module, optimizer: Optimizer
) -> Edge:
    """Return the edge; where all steps have one size its sharpness is λ₁ itself."""
    scale = scale_of(model, optimizer)
    value = first
    if any(bool((d != 1).any()) for d in scale.by_name.values()):
        (value,) = eigenvalues(preconditioned(operator, scale), search=COARSE)
    return Edge(value=value, threshold=scale.threshold, kind=scale.kind, lr=scale.lr)


def _step(
    operator: Operator, slope_N: Tensor, model: nn.Module, optimizer: Optimizer | None
) -> dict[str, Tensor]:
    """Return the unit direction of the next step: −g, or −Dg under an optimiser."""
    by_name = operator.split(-slope_N)
    if optimizer is not None:
        scale = scale_of(model, optimizer).by_name
        by_name = {name: g * scale[name].to(g) for name, g in by_name.items()}
    size = float(torch.stack([g.norm() for g in by_name.values()]).norm())
    return {name: g / (size or 1.0) for name, g in by_name.items()}


def _rows(
    parts: tuple[Attribution, ...], operator: Operator | None
) -> tuple[CurvatureRow, ...]:
    joined = _joined([part.by_sublayer() for part in parts])
    own = _blocks(operator, joined) if operator is not None else {}
    return tuple(
        CurvatureRow(site=site, trace=a, top=b, update=c, sharpness=own.get(site))
        for site, (a, b, c) in joined.items()
    )


def _blocks(operator: Operator, sites: Mapping[str, object]) -> dict[str, float]:
    found = {}
    for site in sites:
        names = [n for n in operator.names if sublayer(n.rpartition(".")[0]) == site]
        if names:
            (value,) = eigenvalues(operator.again(names), search=COARSE)
            found[site] = value.value
    return found


def _joined(parts: list[dict[str, float]]) -> dict[str, tuple[float, float, float]]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _three([part.get(name, 0.0) for part in parts]) for name in names}


def _three(values: list[float]) -> tuple[float, float, float]:
    a, b, c = values
    return a, b, c
