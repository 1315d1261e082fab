"""The verdict on a published claim, and the decorator that makes a check return one.

A check stands under its statement and computes its evidence::

    @EMADI.claim("Thm 5.1", "The statement, in our words.", instead="What is true.")
    def name_of_the_check() -> Found:
        ...
        return "fails" if broken else "holds", {"counterexample": value}

Called without arguments it returns a ``Verdict``; calling it is the regression test.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Literal

Outcome = Literal["holds", "fails", "corrected", "not computable"]
Found = tuple[Outcome, Mapping[str, float]]
"""The outcome, and named numbers computed just now, the counterexample among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One published claim, what we found, and what to use in its place."""

    paper: str
    """Short key, for instance ``emadi2026``."""
    where: str
    """Theorem, corollary, figure or section."""
    claim: str
    """The statement, in our words."""
    outcome: Outcome
    evidence: Mapping[str, float]
    """Named numbers computed just now, the counterexample among them."""
    instead: str
    """The true statement, when the claim fails."""


@dataclass(frozen=True, slots=True)
class Paper:
    """Where claims are from."""

    key: str

    def claim(
        self, where: str, statement: str, *, instead: str
    ) -> Callable[[Callable[[], Found]], Callable[[], Verdict]]:
        """Return a decorator: the check of this statement returns its verdict."""

        def of(check: Callable[[], Found]) -> Callable[[], Verdict]:
            @wraps(check)
            def verdict() -> Verdict:
                outcome, evidence = check()
                return Verdict(
                    paper=self.key,
                    where=where,
                    claim=statement,
                    outcome=outcome,
                    evidence=evidence,
                    instead=instead,
                )

            return verdict

        return of


BAEK_V1 = Paper("baek2025")
BAEK_V2 = Paper("baek2026")
EMADI = Paper("emadi2026")
MUDARISOV = Paper("mudarisov2025")
PETROV = Paper("petrov2025")
