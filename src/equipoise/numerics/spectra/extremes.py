"""Both ends of the spectrum of a symmetric operator known only by its products.

Axes, in this file:  N width of the operator.

Several extreme eigenvalues of a huge symmetric operator in bounded memory.

Axes, in this file:  N width of the operator · K direction of the space · R kept ones.

Thick-restart Lanczos (Wu and Simon, 2000): when the space is full, its best Ritz
vectors and the last residual span the next one. Every new direction is orthogonalised
against all the others, so no eigenvalue is found twice. What is kept is rotated in
place, some columns at a time: memory is ``memory``+1 vectors and never more.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.spectra.estimate import (
    Estimate,
    Search,
    Status,
    broken,
    next_look,
    rounding,
)
from equipoise.numerics.spectra.lanczos import (
    Krylov,
    Matvec,
    Small,
    beyond,
    growth,
    needed,
    operator_step,
)


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


# Columns rotated at a time: small enough to be a negligible second copy.
_STRIPE = 1 << 18
# A new direction that lost more than this to the old ones is cleaned once more.
_TWICE = 0.7


def top_eigenvalues(
    matvec: Matvec,
    start_N: Tensor,
    *,
    count: int = 1,
    smallest: bool = False,
    search: Search | None = None,
    memory: int | None = None,
) -> tuple[Estimate, ...]:
    """Return the ``count`` largest (or smallest) eigenvalues, the outermost first.

    Each is within its ``residual`` of a true eigenvalue; nothing proves that it is the
    extreme one (status RESIDUAL), as with every restarted method. A tolerance τ is met
    when each residual is at most τ times its own eigenvalue.

    Args:
        matvec: Linear and symmetric.
        start_N: Random; its dtype and device are used throughout.
        smallest: The most negative ones in place of the largest.
        search: Tolerance and the limit on products; its ``failure`` is not used.
        memory: Vectors to hold; by default 2·count+1, at least 20.

    Example:
        >>> diagonal = torch.linspace(-1, 3, 50, dtype=torch.float64)
        >>> found = top_eigenvalues(lambda x: diagonal * x, torch.ones(50).double(),
        ...     count=2, search=Search(tolerance=1e-6))
        >>> [round(e.value, 4) for e in found]
        [3.0, 2.9184]
    """
    if start_N.ndim != 1 or start_N.numel() == 0:
        raise InputError(f"a start vector is needed, got shape {tuple(start_N.shape)}")
    width = start_N.numel()
    if not 1 <= count <= width:
        raise InputError(f"count {count}: an operator of width {width} has 1 … {width}")
    room = min(memory or max(2 * count + 1, 20), width)
    if room < min(count + 2, width):
        raise InputError(f"memory {memory}: {count} eigenvalues need {count + 2}")
    search, sign = search or Search(), -1.0 if smallest else 1.0
    space = _Space(matvec, start_N.detach(), room=room, sign=sign)
    status = _until_found(space, count, search)
    if status is Status.BROKEN:
        return (broken(),) * count
    return space.estimates(count, status)


def _until_found(space: "_Space", count: int, search: Search) -> Status:
    while space.products < search.at_most:
        space.grow()
        if not space.finite:
            return Status.BROKEN
        values_K, weights_KK = space.ritz()
        if space.closed:
            return Status.CLOSED
        if space.filled >= count:
            left_R = space.beta * np.abs(weights_KK[-1, :count])
            if (left_R <= search.tolerance * np.abs(values_K[:count])).all():
                return Status.RESIDUAL
        if space.filled == space.room:
            space.restart(keep=count + (space.room - count) // 2)
    return Status.STEP_LIMIT


class _Space:
    """An orthonormal basis, the operator on it, and what the last product left.

    ``filled`` directions have known products; the next one is basis[filled].
    """

    def __init__(
        self, matvec: Matvec, start_N: Tensor, *, room: int, sign: float
    ) -> None:
        self.matvec, self.room, self.sign = matvec, room, sign
        self.filled, self.products, self.beta = 0, 0, 0.0
        self.basis_KN = start_N.new_empty(room + 1, start_N.numel())
        self.basis_KN[0] = start_N / start_N.norm()
        self.projected_KK = np.zeros((room, room))

    @property
    def finite(self) -> bool:
        here = self.projected_KK[: self.filled, : self.filled]
        return bool(np.isfinite(here).all()) and bool(np.isfinite(self.beta))

    @property
    def closed(self) -> bool:
        """Whether the last product left the space by no more than rounding."""
        scale = np.abs(self.projected_KK).max()
        eps = float(torch.finfo(self.basis_KN.dtype).eps)
        whole = self.filled == self.basis_KN.shape[1]
        return whole or self.beta <= 8 * eps * scale

    def grow(self) -> None:
        seen_KN = self.basis_KN[: self.filled + 1]
        image_N = self.matvec(seen_KN[-1])
        if self.sign < 0:
            image_N = -image_N
        along_K = self._cleaned(seen_KN, image_N)
        self.projected_KK[self.filled, : self.filled + 1] = along_K
        self.projected_KK[: self.filled + 1, self.filled] = along_K
        self.filled, self.products = self.filled + 1, self.products + 1

    def _cleaned(self, seen_KN: Tensor, w_N: Tensor) -> Small:
        """Write what is new in w as the next direction; return the old parts of it."""
        whole = float(w_N.norm())
        along_K = torch.zeros(len(seen_KN), dtype=torch.float64)
        for _ in range(3):
            before = float(w_N.norm())
            part_K = seen_KN @ w_N
            w_N = torch.addmv(w_N, seen_KN.mT, part_K, alpha=-1)
            along_K += part_K.double().cpu()
            self.beta = float(w_N.norm())
            if not self.beta < _TWICE * before or self.beta <= 1e-30 * whole:
                break
        torch.div(w_N, self.beta or 1.0, out=self.basis_KN[len(seen_KN)])
        found: Small = along_K.numpy()
        return found

    def ritz(self) -> tuple[Small, Small]:
        """Return the Ritz values, largest first, and the weights of their vectors."""
        here = self.projected_KK[: self.filled, : self.filled]
        values_K, weights_KK = np.linalg.eigh(here)
        return values_K[::-1], weights_KK[:, ::-1]

    def restart(self, *, keep: int) -> None:
        values_K, weights_KK = self.ritz()
        keep = min(keep, self.room - 1)
        self._rotate(weights_KK[:, :keep])
        self.basis_KN[keep] = self.basis_KN[self.filled]
        # The next product fills its own row, arrow included.
        self.projected_KK[:] = 0
        self.projected_KK[range(keep), range(keep)] = values_K[:keep]
        self.filled = keep

    def _rotate(self, weights_KR: Small) -> None:
        turn_RK = torch.from_numpy(weights_KR.T.copy()).to(self.basis_KN)
        held_KN = self.basis_KN[: self.filled]
        for stripe in held_KN.split(_STRIPE, dim=1):
            stripe[: len(turn_RK)] = turn_RK @ stripe

    def estimates(self, count: int, status: Status) -> tuple[Estimate, ...]:
        count = min(count, self.filled)
        values_K, weights_KK = self.ritz()
        left_R = self.beta * np.abs(weights_KK[-1, :count])
        self._rotate(weights_KK[:, :count])
        return tuple(
            Estimate(
                value=self.sign * float(values_K[i]),
                status=status,
                steps=self.products,
                residual=float(left_R[i]),
                error=_relative(float(left_R[i]), float(values_K[i])),
                failure=1.0,
                vector=self.basis_KN[i],
            )
            for i in range(count)
        )


def _relative(residual: float, value: float) -> float:
    return residual / abs(value) if value != 0 else float("inf")
