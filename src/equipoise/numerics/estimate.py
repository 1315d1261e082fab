"""An answer that says how it was found and how far it can be trusted."""

import math
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor


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
    >>> Estimate(status=Status.EXACT, **found).upper
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

    @property
    def certified(self) -> bool:
        return self.failure < 1

    @property
    def upper(self) -> float:
        """Return value + error·|value|, or infinity when nothing bounds the truth."""
        if not self.certified:
            return math.nan if math.isnan(self.value) else math.inf
        return self.value + self.error * abs(self.value)

    @property
    def lower(self) -> float:
        """Return value − error·|value|, or −infinity when nothing bounds the truth."""
        if not self.certified:
            return math.nan if math.isnan(self.value) else -math.inf
        return self.value - self.error * abs(self.value)


def broken() -> Estimate:
    """Return what is known when a NaN or an infinity came by: nothing."""
    nan = math.nan
    return Estimate(
        value=nan, status=Status.BROKEN, steps=0, residual=nan, error=nan, failure=1.0
    )
