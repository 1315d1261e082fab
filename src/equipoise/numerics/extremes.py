"""Both ends of the spectrum of a symmetric operator known only by its products.

Axes, in this file:  N width of the operator.
"""

import math
from typing import NamedTuple

from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.estimate import Estimate, Status, broken
from equipoise.numerics.gram import operator_step
from equipoise.numerics.lanczos import Krylov, Matvec, beyond, growth, needed
from equipoise.numerics.stopping import Search, next_look, rounding


class Extremes(NamedTuple):
    """The smallest and the largest eigenvalue, signed."""

    smallest: Estimate
    largest: Estimate


def extremes(
    matvec: Matvec, start_N: Tensor, *, search: Search | None = None, warm: bool = False
) -> Extremes:
    """Return the extreme eigenvalues of a symmetric operator x ↦ Ax.

    Ritz values never leave the spectrum, so the truth lies outside the two values: for
    a random start, by no more than ``error``·|value|, but for ``search.failure``. The
    tolerance is relative to the larger of the two in size.

    Args:
        matvec: Linear and symmetric: nothing here can tell if it is not.
        start_N: Gaussian, for a probability; its dtype and device are used throughout.
        warm: Say so when the start is not random; only the residual is known then.

    Example:
        >>> import torch
        >>> diagonal = torch.tensor([-2.0, 0.5, 1.0, 3.0])
        >>> found = extremes(lambda x: diagonal * x, torch.ones(4))
        >>> round(found.smallest.value, 5), round(found.largest.value, 5)
        (-2.0, 3.0)
    """
    if start_N.ndim != 1 or start_N.numel() == 0:
        raise InputError(f"a start vector is needed, got shape {tuple(start_N.shape)}")
    search = search or Search()
    krylov = Krylov(operator_step(matvec), start_N.detach(), at_most=search.at_most)
    failure = 1.0 if warm or search.failure is None else search.failure
    status = _until_settled(krylov, search.tolerance, failure)
    if status is Status.BROKEN:
        return Extremes(broken(), broken())
    return Extremes(_end(krylov, status, failure, -1), _end(krylov, status, failure, 1))


def _until_settled(krylov: Krylov, tolerance: float, failure: float) -> Status:
    look = 1
    while krylov.steps < krylov.at_most:
        krylov.grow()
        if not krylov.finite:
            return Status.BROKEN
        if krylov.closed:
            return Status.CLOSED
        if krylov.steps >= look:
            if _settled(krylov, tolerance, failure):
                return Status.PROBABLE if failure < 1 else Status.RESIDUAL
            look = next_look(krylov)
    return Status.STEP_LIMIT


def _settled(krylov: Krylov, tolerance: float, failure: float) -> bool:
    values_K, weights_KK = krylov.ritz()
    low, high = float(values_K[0]), float(values_K[-1])
    step = tolerance * max(abs(low), abs(high))
    if failure < 1:
        target = needed(krylov.width, failure=failure)
        above = growth(krylov, high + step).log
        return min(above, growth(krylov, low - step, sign=-1).log) >= target
    ends = (krylov.residual(weights_KK[:, at]) for at in (0, -1))
    return max(ends) <= step


def _end(krylov: Krylov, status: Status, failure: float, sign: int) -> Estimate:
    values_K, weights_KK = krylov.ritz()
    at = -1 if sign > 0 else 0
    value, weights_K = float(values_K[at]), weights_KK[:, at]
    residual = krylov.residual(weights_K)
    proven = failure < 1 and status is not Status.CLOSED
    reach = beyond(krylov, value, failure=failure, sign=sign) if proven else residual
    reach += rounding(krylov) * krylov.scale
    return Estimate(
        value=value,
        status=status,
        steps=krylov.steps,
        residual=residual,
        error=reach / abs(value) if value != 0 else math.inf,
        failure=failure,
        vector=krylov.vector(weights_K),
    )
