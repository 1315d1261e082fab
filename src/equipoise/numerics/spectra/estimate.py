"""An answer that says how it was found and how far it can be trusted.

When a Krylov search may stop, and what has been shown by then.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.spectra.lanczos import Growth, Krylov, Small, growth, needed
from equipoise.records import html_table


class Status(Enum):
    """How an estimate ended; each member's value is the sentence shown to the user."""

    EXACT = "everything was computed; the error is rounding"
    PROBABLE = (
        "the truth is at most value·(1+error), but for the stated probability "
        "over the random start"
    )
    CLOSED = "the Krylov space closed: nothing is left to find from this start"
    RESIDUAL = (
        "a true value lies within the error, but nothing shows that it is the "
        "extreme one: the start was not random, or no probability was asked for"
    )
    STEP_LIMIT = "the step limit came before the tolerance; error is what was reached"
    SAMPLED = "a mean over random probes; the error is one standard error"
    BROKEN = "the input is not finite, or an operation on it was not"

    @property
    def explanation(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One number, how it was found, and what is known about its error.

    >>> found = {"value": 2.0, "steps": 0, "residual": 0.5, "error": 0.25}
    >>> round(Estimate(status=Status.EXACT, **found).upper, 12)
    2.5
    """

    value: float
    status: Status
    steps: int
    """Products with the operator (one step of A and Aᵀ counts once), or probes."""
    residual: float
    """Absolute: ‖Aᵀu − σv‖ or ‖Ax − λx‖; for a sampled mean, its standard error."""
    error: float
    """Relative to \\|value\\|."""
    failure: float = 0.0
    """Chance that ``upper`` is too small; 1 when nothing bounds it from above."""
    vector: Tensor | None = field(default=None, repr=False, compare=False)
    """Where it was attained: the warm start of the next call."""

    def __repr__(self) -> str:
        size = abs(self.value) * self.error
        status = self.status.name.lower().replace("_", " ")
        return f"Estimate({self.value:.6g} ± {size:.2g}, {status}, {self.steps} steps)"

    def _repr_html_(self) -> str:
        rows = [
            ("value", f"{self.value:.6g}"),
            ("between", f"{self.lower:.6g} and {self.upper:.6g}"),
            ("status", self.status.explanation),
            ("chance that the bound is too small", f"{self.failure:.2g}"),
            ("steps", self.steps),
        ]
        return html_table("Estimate", rows)

    @property
    def certified(self) -> bool:
        return self.failure < 1

    @property
    def upper(self) -> float:
        """Return value + error·|value|, or infinity when nothing bounds the truth."""
        if not self.certified:
            return math.nan if math.isnan(self.value) else math.inf
        return _outwards(self.value, self.error * abs(self.value))

    @property
    def lower(self) -> float:
        """Return value − error·|value|, or −infinity when nothing bounds the truth."""
        if not self.certified:
            return math.nan if math.isnan(self.value) else -math.inf
        return _outwards(self.value, -self.error * abs(self.value))


def _outwards(value: float, change: float) -> float:
    """Return value + change, not nearer to the value than the exact sum is.

    A product and a sum round by less than two units in the last place of the result.
    """
    total, away = value + change, math.copysign(math.inf, change)
    return math.nextafter(math.nextafter(total, away), away) if change else total


def broken() -> Estimate:
    """Return what is known when a NaN or an infinity came by: nothing."""
    nan = math.nan
    return Estimate(
        value=nan, status=Status.BROKEN, steps=0, residual=nan, error=nan, failure=1.0
    )


# A small eigenproblem is solved each time the space has grown by this factor.
_LOOK = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """When to stop, and what has to be shown by then."""

    tolerance: float = 1e-4
    """Relative error asked for."""
    failure: float | None = 1e-6
    """Chance, over the random start, that the bound is too small. None asks only for
    the residual: a true value is that close. A warm start implies None."""
    at_most: int = 400
    """Steps."""

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise InputError(f"tolerance {self.tolerance}: give a number in (0, 1)")
        if self.failure is not None and not 0 < self.failure < 1:
            raise InputError(f"failure {self.failure}: give a probability, or None")
        if self.at_most < 1:
            raise InputError(f"at_most {self.at_most}: at least one step is needed")


def rounding(krylov: Krylov) -> float:
    """Return the relative allowance for rounding in the products: (8+√N)·ε."""
    return (8 + math.sqrt(krylov.width)) * torch.finfo(krylov.basis_KN.dtype).eps


def left_for_search(krylov: Krylov, tolerance: float) -> float:
    """Return the tolerance without what rounding may take of it."""
    left = tolerance - rounding(krylov)
    if left <= 0:
        dtype = str(krylov.basis_KN.dtype).removeprefix("torch.")
        raise InputError(
            f"tolerance {tolerance:g} is below the rounding of {dtype} at width "
            f"{krylov.width} ({rounding(krylov):.1g}): ask for less, or pass float64"
        )
    return left


def next_look(krylov: Krylov) -> int:
    """Return the step at which the small eigenproblem is worth solving again."""
    return math.ceil(_LOOK * krylov.steps)


def until_proven(krylov: Krylov, search: Search) -> tuple[Status, float]:
    """Grow until no eigenvalue beyond (1+tolerance)²·top is probable; return that end.

    The polynomial is carried along at one point just beyond the largest Ritz value,
    and the small eigenproblem is solved again only when that value has overtaken it.
    """
    assert search.failure is not None
    target = needed(krylov.width, failure=search.failure)
    factor = (1 + left_for_search(krylov, search.tolerance)) ** 2
    point, look = Growth(0.0), 1
    while krylov.steps < krylov.at_most:
        krylov.grow()
        if ended := _ended(krylov):
            return ended, math.inf
        point.take(krylov.alphas[-1], krylov.betas[-1])
        if point.log == -math.inf and krylov.steps >= look:
            point = growth(krylov, krylov.top() * factor)
            look = next_look(krylov)
        if point.log >= target:
            return Status.PROBABLE, point.at
    return Status.STEP_LIMIT, math.inf


def until_residual(krylov: Krylov, search: Search) -> Status:
    """Grow until the residual puts a true eigenvalue within (1±tolerance)²·top."""
    goal, look = left_for_search(krylov, search.tolerance), 1
    while krylov.steps < krylov.at_most:
        krylov.grow()
        if ended := _ended(krylov):
            return ended
        if krylov.steps >= look:
            if residual_error(krylov, *krylov.ritz()) <= goal:
                return Status.RESIDUAL
            look = next_look(krylov)
    return Status.STEP_LIMIT


def _ended(krylov: Krylov) -> Status | None:
    if not krylov.finite:
        return Status.BROKEN
    return Status.CLOSED if krylov.closed else None


def residual_error(krylov: Krylov, values_K: Small, weights_KK: Small) -> float:
    """Return how far, relatively, √top may be from the root of a true eigenvalue.

    One lies within the residual of the top Ritz value. The sharper r²/gap of Kato and
    Temple is not used: the next Ritz value says nothing about nearer values.
    """
    top, residual = float(values_K[-1]), krylov.residual(weights_KK[:, -1])
    return 1 - math.sqrt(max(0.0, 1 - residual / top)) if top > 0 else math.inf
