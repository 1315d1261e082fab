"""What a claim's check returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["holds", "fails", "corrected", "not computable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One published claim, what we found, and what to use in its place.

    A check is a function without required arguments that computes its evidence and
    returns a Verdict; calling it is the regression test.
    """

    paper: str
    """Short key, for instance ``emadi2026``."""
    where: str
    """Theorem, corollary, figure or section."""
    claim: str
    """The statement, in our words."""
    outcome: Outcome
    evidence: Mapping[str, float]
    """Named numbers computed just now, the counterexample among them."""
    instead: str = ""
    """The true statement, when the claim fails."""
