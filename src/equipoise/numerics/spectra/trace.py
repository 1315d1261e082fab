"""The trace of an operator from random probes, with its standard error.

Axes, in this file:  N width of the operator · M probe · R sketch.
"""

import math

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.spectra.estimate import Estimate, Status, broken
from equipoise.numerics.spectra.lanczos import Matvec


def hutchinson(
    matvec: Matvec,
    width: int,
    *,
    probes: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Estimate:
    """Return tr A ≈ mean of zᵀAz over random signs z (Hutchinson, 1989).

    Unbiased for every square A; the variance is 2·Σ_{i≠j} of the squared symmetric
    part, so a diagonal operator is read exactly. ``error`` is one standard error,
    measured from the spread of the probes, relative to \\|value\\|.

    Example:
        >>> rng = torch.Generator().manual_seed(0)
        >>> hutchinson(lambda z: 2 * z, 5, probes=4, generator=rng).value
        10.0
    """
    if probes < 2:
        raise InputError(f"probes {probes}: a standard error needs at least 2")
    signs_MN = _signs(probes, width, generator, dtype)
    return _sampled(_quadratic(matvec, signs_MN), steps=probes)


def hutch_plus_plus(
    matvec: Matvec,
    width: int,
    *,
    probes: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Estimate:
    """Return tr A as an exact part plus Hutchinson on what is left of it.

    A third of the products finds a basis Q of the range, a third measures tr QᵀAQ, the
    rest probes (I−QQᵀ)A(I−QQᵀ) (Meyer, Musco, Musco and Woodruff, 2021). For positive A
    the error falls like 1/probes and not like its root.

    Example:
        >>> rng, d = torch.Generator().manual_seed(0), torch.tensor([100.0, 1.0, 1.0])
        >>> found = hutch_plus_plus(lambda z: d * z, 3, probes=6, generator=rng)
        >>> abs(found.value - 102) < 1e-3
        True
    """
    if probes < 6:
        raise InputError(f"probes {probes}: Hutch++ needs at least 6")
    rank = min(probes // 3, width)
    sketch_RN = _signs(rank, width, generator, dtype)
    basis_NR = torch.linalg.qr(_products(matvec, sketch_RN).mT).Q
    exact = _quadratic(matvec, basis_NR.mT).sum()
    signs_MN = _signs(probes - 2 * rank, width, generator, dtype)
    left_MN = signs_MN - (signs_MN @ basis_NR) @ basis_NR.mT
    return _sampled(exact + _quadratic(matvec, left_MN), steps=probes)


def _signs(
    count: int, width: int, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    shape, device = (count, width), generator.device
    bits_MN = torch.randint(0, 2, shape, generator=generator, device=device)
    return (2 * bits_MN - 1).to(dtype)


def _products(matvec: Matvec, x_MN: Tensor) -> Tensor:
    return torch.stack([matvec(x_N) for x_N in x_MN])


def _quadratic(matvec: Matvec, x_MN: Tensor) -> Tensor:
    """Return xᵀAx of each row, summed in float64: traces cancel."""
    return (x_MN.double() * _products(matvec, x_MN).double()).sum(-1)


def _sampled(samples_M: Tensor, *, steps: int) -> Estimate:
    value = float(samples_M.mean())
    if not math.isfinite(value):
        return broken()
    spread = float(samples_M.std() / math.sqrt(len(samples_M)))
    return Estimate(
        value=value,
        status=Status.SAMPLED,
        steps=steps,
        residual=spread,
        error=spread / abs(value) if value != 0 else math.inf,
        failure=1.0,
    )
