"""The verdict on a published claim, and the decorator that makes a check return one.

A check computes its evidence, and its docstring holds the statement::

    @EMADI.claim("App. E.2")
    def greedy_prefix() -> Found:
        \"""What is computed, in one line.

        Claim: The published statement, in our words.

        Instead: What is true.
        \"""
        ...
        return "fails" if broken else "holds", {"counterexample": value}

Called without arguments it returns a ``Verdict``; calling it is the regression test.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Literal

Outcome = Literal["holds", "fails", "corrected", "not computable"]
Found = tuple[Outcome, Mapping[str, float]]
"""The outcome, and named numbers computed just now, the counterexample among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One published claim, what we found, and what to use in its place.

    ``paper`` is a short key such as ``emadi2026``; ``where`` a theorem, figure or
    section; ``instead`` the true statement, or what a claim that holds does not show.
    """

    paper: str
    where: str
    claim: str
    outcome: Outcome
    evidence: Mapping[str, float]
    instead: str


@dataclass(frozen=True, slots=True)
class Paper:
    """Where claims are from."""

    key: str

    def claim(
        self, where: str
    ) -> Callable[[Callable[[], Found]], Callable[[], Verdict]]:
        """Return a decorator: the check of a statement returns its verdict."""

        def decorated(check: Callable[[], Found]) -> Callable[[], Verdict]:
            texts = {name: _section(check, name) for name in ("claim", "instead")}

            @wraps(check)
            def verdict() -> Verdict:
                outcome, evidence = check()
                return Verdict(
                    paper=self.key,
                    where=where,
                    outcome=outcome,
                    evidence=evidence,
                    **texts,
                )

            return verdict

        return decorated


def _section(check: Callable[[], Found], name: str) -> str:
    """Return a section of a check's docstring; empty where ``-OO`` took it away."""
    found = re.search(rf"^ *{name}: (.*?)(?:\n\n|\s*\Z)", check.__doc__ or "", _FLAGS)
    return " ".join(found[1].split()) if found else ""


_FLAGS = re.MULTILINE | re.DOTALL | re.IGNORECASE

BAEK_V1 = Paper("baek2025")
BAEK_V2 = Paper("baek2026")
EMADI = Paper("emadi2026")
MUDARISOV = Paper("mudarisov2025")
PETROV = Paper("petrov2025")
