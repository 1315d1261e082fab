"""The result of checking a published claim, and the decorator that registers a check.

A check computes its evidence, and its docstring holds the statement::

    @EMADI.claim("App. E.2", kind="heuristic")
    def greedy_prefix() -> Found:
        \"""What is computed, in one line.

        Claim: The published statement, in our words.

        Rule: When a part is true, where it is not obvious.

        Instead: What is true.

        Practice: What to do about it, where a practitioner should know.
        \"""
        ...
        return judged({"no row is missed": missed == 0}, {"rows missed": missed})

Called without arguments it returns a ``ClaimResult``; calling it is the regression
test. The verdict follows from parts in the evidence by ``rules``: ``Claim.run`` finds
it again from the evidence alone, and refuses any other. A refutation whose
counterexample is algebraic stands only if ``exact`` confirms it, and what says ≤ only
if ``search`` finds no violation.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Literal, get_args

from equipoise.errors import InputError
from equipoise.records import Record
from equipoise_lab.claims.exact import COUNTEREXAMPLES, confirmation
from equipoise_lab.claims.rules import (
    USUAL,
    ClaimVerdict,
    Parts,
    experiment,
    statement,
)
from equipoise_lab.claims.search import INEQUALITIES, violated

VERDICTS: tuple[ClaimVerdict, ...] = get_args(ClaimVerdict)
WRONG: tuple[ClaimVerdict, ...] = ("refuted", "corrected")
"""Not true as printed."""
Kind = Literal[
    "definition",
    "lemma",
    "theorem",
    "corollary",
    "heuristic",
    "experiment",
    "recommendation",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
MEASURED: tuple[Kind, ...] = ("experiment", "recommendation")
Found = tuple[ClaimVerdict, Mapping[str, float]]
"""The verdict, and named numbers computed just now, the counterexample among them."""


def judged(
    parts: Parts,
    numbers: Mapping[str, float],
    *,
    caveat: bool = False,
    instead: bool | None = None,
) -> Found:
    """Return the label of a statement by its parts, which stand in the evidence."""
    verdict = statement(parts, caveat=caveat, instead=instead)
    named = {CAVEAT: 1.0} if caveat else {}
    if instead is not None:
        named[IN_PLACE] = float(instead)
    return verdict, {**_outcomes(parts), **named, **numbers}


def judged_pattern(
    parts: Parts, numbers: Mapping[str, float], *, interval: bool = True
) -> Found:
    """Return the label of an experiment by its parts, which stand in the evidence."""
    named = {} if interval else {BARE: 1.0}
    verdict = experiment(parts, interval=interval)
    return verdict, {**_outcomes(parts), **named, **numbers}


def _outcomes(parts: Parts) -> dict[str, float]:
    """Return 1 for a part that is true, 0 for a false one, NaN for an undecided one."""
    values = {True: 1.0, False: 0.0, None: math.nan}
    return {f"{PART}{name}": values[outcome] for name, outcome in parts.items()}


def labels_of(evidence: Mapping[str, float]) -> set[ClaimVerdict]:
    """Return the labels of this evidence by the rules: as a statement, as a pattern.

    >>> sorted(labels_of({"part: even": 1.0, "part: odd": 0.0}))
    ['partly']
    """
    outcomes = {1.0: True, 0.0: False}
    parts = {
        name: outcomes.get(value)
        for name, value in evidence.items()
        if name.startswith(PART)
    }
    if not parts:
        return set()
    instead = evidence.get(IN_PLACE) == 1
    return {
        statement(parts, caveat=CAVEAT in evidence, instead=instead),
        experiment(parts, interval=BARE not in evidence),
    }


PART = "part: "
"""What the names of parts begin with in the evidence."""
CAVEAT = "the caveat was met"
IN_PLACE = "what stands in its place was checked"
BARE = "no part has an interval"
UNJUDGED: ClaimVerdict = "not checkable here"
"""The label of what has no evidence: no results are at hand."""
OURS = "ours"
"""What ``where`` begins with if the statement is not in the paper in these words."""
SEED = 0
"""Checks draw from generators of their own, seeded with this unless they say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimResult(Record):
    """One published claim, what we found, and what to use in its place."""

    id: str
    """The paper's key and the check's name, as in ``emadi2026.greedy_prefix``."""
    paper: str
    where: str
    """A theorem, figure or section."""
    kind: Kind
    statement: str
    """What is claimed, in our words."""
    verdict: ClaimVerdict
    evidence: Mapping[str, float]
    instead: str
    """What is true, or what a claim that holds does not show."""
    statistic: str = ""
    """What is computed."""
    rule: str = ""
    """How the label follows from it."""
    practice: str = ""
    """What a practitioner should do, of the claims that matter most to one."""
    exact: str = ""
    """Of what is refuted or corrected: confirmed without rounding, or why not."""
    seed: int = SEED


Check = Callable[[], ClaimResult]


@dataclass(frozen=True, slots=True)
class Claim:
    """A registered check: what it is about is known before it runs."""

    id: str
    paper: "Paper"
    where: str
    kind: Kind
    statement: str
    instead: str
    practice: str
    statistic: str
    rule: str
    check: Callable[[], Found]

    def run(self, *, thorough: bool = False) -> ClaimResult:
        """Compute the evidence and return it with the verdict it gives.

        What says ≤ is searched for a violation, from four times as many points by four
        times as many steps if ``thorough``; a counterexample in ``exact`` is computed
        again without rounding.
        """
        verdict, evidence = self.check()
        if verdict != UNJUDGED and verdict not in labels_of(evidence):
            raise InputError(
                f"{self.id}: {verdict!r} does not follow from its evidence: return "
                "judged(parts, numbers), or judged_pattern for an experiment"
            )
        verdict, evidence = self._searched(
            verdict, evidence, rounds=4 if thorough else 1
        )
        verdict, evidence = self._confirmed(verdict, evidence)
        return ClaimResult(
            id=self.id,
            paper=self.paper.key,
            where=self.where,
            kind=self.kind,
            statement=self.statement,
            verdict=verdict,
            evidence=evidence,
            instead=self.instead,
            statistic=self.statistic,
            rule=self.rule,
            practice=self.practice,
            exact=confirmation(self.id) if verdict in (*WRONG, "partly") else "",
        )

    def _searched(
        self, verdict: ClaimVerdict, evidence: Mapping[str, float], *, rounds: int
    ) -> Found:
        """Climb towards a violation; one that is found refutes the inequality."""
        known = INEQUALITIES.get(self.id)
        if known is None:
            return verdict, evidence
        found = known.largest(rounds=rounds)
        named = {f"largest ratio, {how}": value for how, value in found.items()}
        return "refuted" if violated(found) else verdict, {**evidence, **named}

    def _confirmed(self, verdict: ClaimVerdict, evidence: Mapping[str, float]) -> Found:
        """Compute the counterexample without rounding; one that fails is none."""
        known = COUNTEREXAMPLES.get(self.id)
        if known is None or verdict not in (*WRONG, "partly"):
            return verdict, evidence
        (most, found), exceeds = known.evaluated()
        named = {"exact, at most": float(most), "exact, found": float(found)}
        return verdict if exceeds else UNJUDGED, {**evidence, **named}


CLAIMS: dict[str, Claim] = {}
"""Every registered check by its id; ``catalogue`` imports them all."""


@dataclass(frozen=True, slots=True)
class Paper:
    """Where claims are from."""

    key: str
    title: str

    def claim(
        self, where: str, *, kind: Kind
    ) -> Callable[[Callable[[], Found]], Check]:
        """Return a decorator that registers a check and makes it return its result."""

        def decorated(check: Callable[[], Found]) -> Check:
            claim = Claim(
                id=f"{self.key}.{check.__name__}",
                paper=self,
                where=where,
                kind=kind,
                statement=_section(check, "claim"),
                instead=_section(check, "instead"),
                practice=_section(check, "practice"),
                statistic=_first(check),
                rule=_section(check, "rule") or USUAL[kind in MEASURED],
                check=check,
            )
            if claim.id in CLAIMS:
                raise InputError(f"two checks are called {claim.id}")
            CLAIMS[claim.id] = claim

            @wraps(check)
            def result() -> ClaimResult:
                return claim.run()

            return result

        return decorated


def _first(check: Callable[[], Found]) -> str:
    """Return a docstring's first line; empty where ``-OO`` took it away."""
    return (check.__doc__ or "").partition("\n")[0]


def _section(check: Callable[[], Found], name: str) -> str:
    """Return a section of a check's docstring; empty where ``-OO`` took it away."""
    found = re.search(rf"^ *{name}: (.*?)(?:\n\n|\s*\Z)", check.__doc__ or "", _FLAGS)
    return " ".join(found[1].split()) if found else ""


_FLAGS = re.MULTILINE | re.DOTALL | re.IGNORECASE

EMADI = Paper("emadi2026", "Emadi 2026, exact attention sensitivity (arXiv 2602.18849)")
MUDARISOV = Paper(
    "mudarisov2025",
    "Mudarisov et al. 2025, limits of normalisation in attention (arXiv 2508.17821)",
)
PETROV = Paper(
    "petrov2025", "Petrov et al. 2025, transformer Hessians (arXiv 2510.16927)"
)
BAEK_V1 = Paper("baek2025", "Baek 2025, numerical fragility, v1 (arXiv 2510.21770)")
BAEK_V2 = Paper("baek2026", "Baek 2026, numerical fragility, v2 (arXiv 2510.21770)")
PAPERS = (EMADI, MUDARISOV, PETROV, BAEK_V1, BAEK_V2)
