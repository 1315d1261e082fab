"""The rules by which a label follows from evidence; no check types a label in.

A statement is taken apart into *parts*, each true, false or undecided (``None``). An
interval decides a part only where all of it lies on one side. Then, for statements

    every part true            holds (with a caveat where the check names one)
    some true, some false      partly
    none true, some false      corrected, where our statement was checked; else refuted
    else (something undecided) undecided

and for patterns of experiments the same with *pattern reproduced*, *partly*, *pattern
not reproduced* and *undecided*. One trained model has no interval: what it shows is at
most *partly* a pattern, and so does a median over seeds without its interval; what they
contradict is contradicted. *Not checkable here* is what has no evidence: results are
missing, or a counterexample was not confirmed.
"""

from collections.abc import Mapping
from typing import Literal

from equipoise_lab.results.statistics import PairedDifference

ClaimVerdict = Literal[
    "holds",
    "holds with a caveat",
    "partly",
    "corrected",
    "refuted",
    "undecided",
    "pattern reproduced",
    "pattern not reproduced",
    "not checkable here",
]
Outcome = bool | None
Parts = Mapping[str, Outcome]


def above(found: PairedDifference, limit: float = 0.0) -> Outcome:
    """Return whether an interval lies above a limit; None where it holds the limit.

    >>> above(PairedDifference(mean=1.0, low=-1.0, high=3.0, p=0.3, n=5)) is None
    True
    """
    if not found.low <= found.high:
        return None
    return True if found.low > limit else False if found.high < limit else None


def below(found: PairedDifference, limit: float = 0.0) -> Outcome:
    """Return whether an interval lies below a limit; None where it holds the limit."""
    other = above(found, limit)
    return None if other is None else not other


def within(found: PairedDifference, low: float, high: float) -> Outcome:
    """Return whether an interval lies in a band; None where it reaches over an end."""
    if not found.low <= found.high:
        return None
    if low <= found.low and found.high <= high:
        return True
    return False if found.high < low or found.low > high else None


def statement(
    parts: Parts, *, caveat: bool = False, instead: Outcome = None
) -> ClaimVerdict:
    """Return the label of a definition, a theorem or another statement.

    ``instead`` says whether what we state in its place was checked and held.

    >>> statement({"κ ≤ ½": True, "κ > ½": False})
    'partly'
    >>> statement({"every row": False}, instead=True)
    'corrected'
    """
    found = set(parts.values())
    if found == {True}:
        return "holds with a caveat" if caveat else "holds"
    if False not in found:
        return "undecided"
    if True in found:
        return "partly"
    return "corrected" if instead else "refuted"


def experiment(parts: Parts, *, interval: bool = True) -> ClaimVerdict:
    """Return the label of a pattern; ``interval`` is False where no part has one.

    >>> experiment({"falls": True, "to 0": None})
    'undecided'
    """
    found = set(parts.values())
    if found == {True}:
        return "pattern reproduced" if interval else "partly"
    if False not in found:
        return "undecided"
    return "partly" if True in found else "pattern not reproduced"


USUAL = {
    False: "A part is false where it fails at one point by more than rounding; what "
    "stands in its place must hold at every point checked.",
    True: "A part is decided where its interval over seeds lies on one side of its "
    "limit, and open where it holds the limit.",
}
"""The rule of a check that states none: of statements, and of experiments."""
