"""Several extreme eigenvalues of a huge symmetric operator in bounded memory.

Axes, in this file:  N width of the operator · K direction of the space · R kept ones.

Thick-restart Lanczos (Wu and Simon, 2000): when the space is full, its best Ritz
vectors and the last residual span the next one. Every new direction is orthogonalised
against all the others, so no eigenvalue is found twice. What is kept is rotated in
place, some columns at a time: memory is ``memory``+1 vectors and never more.
"""

import numpy as np
import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.estimate import Estimate, Status, broken
from equipoise.numerics.lanczos import Matvec, Small
from equipoise.numerics.stopping import Search

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
