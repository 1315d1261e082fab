"""Spectral norms of matrices and of products never formed, each with a certificate.

Axes, in this file:  M rows · N columns · R inner width of a product · X a stack.

Golub–Kahan–Lanczos on AᵀA: a step is one product with A and one with Aᵀ. Largest
singular values of Gaussian matrices need 50 to 80 steps, of trained ones 10 to 20;
plain power iteration is still 5e-3 low after 100 and certifies nothing.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.estimate import Estimate, Status, broken
from equipoise.numerics.extremes import Extremes, extremes
from equipoise.numerics.hutchinson import hutch_plus_plus, hutchinson
from equipoise.numerics.lanczos import Krylov, beyond
from equipoise.numerics.products import DENSE, Product
from equipoise.numerics.stopping import (
    Search,
    residual_error,
    rounding,
    until_proven,
    until_residual,
)
from equipoise.numerics.tracking import fixed_steps, tracked_norm

__all__ = [
    "Estimate",
    "Extremes",
    "Search",
    "Status",
    "extremes",
    "fixed_steps",
    "hutch_plus_plus",
    "hutchinson",
    "spectral_norm",
    "spectral_norms",
    "tracked_norm",
]


def spectral_norm(
    *factors: Tensor,
    search: Search | None = None,
    start: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Return ‖A‖₂, or ‖A·B·…‖₂ without forming the product.

    One or two factors no wider than 128 somewhere (a head's W_V·W_O) are decomposed
    exactly in float64, by QR of each; anything else is iterated in float32 or
    float64, whichever it came in.

    Args:
        factors: One matrix, or matrices whose product is meant, in order. 16-bit ones
            are read as float32.
        search: Tolerance, failure probability and step limit.
        start: ``vector`` of an earlier estimate of (nearly) the same matrix. Few steps
            suffice then, but the status is RESIDUAL: a start that is not random
            proves nothing about what it does not contain.
        generator: Of the random start; seeded with 0 when not given.

    Example:
        >>> round(spectral_norm(torch.diag(torch.tensor([3.0, 4.0]))).value, 4)
        4.0
    """
    search = search or Search()
    product = Product(factors)
    if not product.finite:
        return broken()
    if product.zero:
        return Estimate(
            value=0.0, status=Status.EXACT, steps=0, residual=0.0, error=0.0
        )
    if product.thinnest <= DENSE and len(factors) <= 2:
        return _dense(product)
    return _iterated(product, search, _start(product.last, start, generator), start)


def spectral_norms(
    *stacks: Tensor | Iterable[Tensor],
    search: Search | None = None,
    starts: Iterable[Tensor | None] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Estimate, ...]:
    """Return the spectral norm of each matrix, or each product, of a stack.

    ``spectral_norms(V_XMR, O_XRN)`` gives one estimate per head. A loop: batched
    matrix–vector products are slower than that on a CPU.

    Example:
        >>> two = spectral_norms(torch.eye(2).expand(2, 2, 2))
        >>> [round(found.value, 4) for found in two]
        [1.0, 1.0]
    """
    rows = list(zip(*stacks, strict=True))
    warm = [None] * len(rows) if starts is None else list(starts)
    return tuple(
        spectral_norm(*row, search=search, start=start, generator=generator)
        for row, start in zip(rows, warm, strict=True)
    )


def _dense(product: Product) -> Estimate:
    small = product.compressed()
    value = float(torch.linalg.svdvals(small)[0])
    sizes = [float(factor.double().norm()) for factor in product.factors]
    lost = math.sqrt(max(small.shape)) * torch.finfo(torch.float64).eps
    residual = lost * math.prod(sizes)
    error = residual / value if value > 0 else math.inf
    return Estimate(
        value=value, status=Status.EXACT, steps=0, residual=residual, error=error
    )


def _start(
    last: Tensor, start: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    N = last.shape[1]
    if start is not None:
        if start.shape != (N,):
            raise InputError(f"start has shape {tuple(start.shape)}, expected ({N},)")
        return start.to(last)
    generator = generator or torch.Generator().manual_seed(0)
    return torch.randn(N, generator=generator, device=generator.device).to(last)


def _iterated(
    product: Product, search: Search, start_N: Tensor, warm: Tensor | None
) -> Estimate:
    krylov = Krylov(product.step(), start_N, at_most=search.at_most)
    if warm is None and search.failure is not None:
        status, end = until_proven(krylov, search)
        failure = search.failure
    else:
        status, end = until_residual(krylov, search), math.inf
        failure = 1.0
    if status is Status.BROKEN:
        return _retried(product, search, start_N, warm)
    if status is Status.STEP_LIMIT and failure < 1:
        top = krylov.top()
        end = top + beyond(krylov, top, failure=failure)
    return _read(krylov, status, failure=failure, end=end, scale=product.scale)


def _retried(
    product: Product, search: Search, start_N: Tensor, warm: Tensor | None
) -> Estimate:
    """Return the answer with the true scale, or that the matrix is not finite."""
    if product.measured:
        return broken()
    product.measure()
    if not product.finite:
        return broken()
    return _iterated(product, search, start_N, warm)


def _read(
    krylov: Krylov, status: Status, *, failure: float, end: float, scale: float
) -> Estimate:
    """Return σ = √top; its square ends at ``end``, or is known by its residual only."""
    values_K, weights_KK = krylov.ritz()
    top = float(values_K[-1])
    if math.isfinite(end):
        error = math.sqrt(end / top) - 1
    else:
        error = residual_error(krylov, values_K, weights_KK)
    return Estimate(
        value=math.sqrt(top) * scale,
        status=status,
        steps=krylov.steps,
        residual=krylov.residual(weights_KK[:, -1]) / math.sqrt(top) * scale,
        error=error + rounding(krylov),
        failure=failure,
        vector=krylov.vector(weights_KK[:, -1]),
    )
