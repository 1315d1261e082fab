"""Checks of influence: what moves, when something else of the input changes."""

from collections.abc import Iterable, Sequence
from typing import Any

from equipoise.judging.checks.forward import shift_of
from equipoise.judging.checks.registry import Violation, finds, violated
from equipoise.judging.facts import Facts

PAIRS = 8
"""Pairs of places with one token that must all look the same."""
SAME, OTHER = 8, 64
"""Units of rounding within which passes agree: through the same kernels, in which a
row that nothing reaches is computed as before, and through other ones."""


def _tried(facts: Sequence[Facts]) -> dict[str, Any]:
    section = dict(facts[-1].section("influence"))
    return section if section.get("tried") else {}


def _rounding(found: dict[str, Any]) -> float:
    """Return the share of the logits' size that rounding may move."""
    return float(SAME * max(found["noise"], found["format"]))


def _moves(facts: Sequence[Facts], what: str) -> Iterable[Violation] | None:
    """Return whether something moved that should not."""
    found = _tried(facts)
    if what not in found:
        return None
    return [violated(moved=found[what])] if found[what] > _rounding(found) else []


@finds("check.influence_future")
def influence_future(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Tokens from a place on move the logits of the row before, which counts."""
    found, shift = _tried(facts), shift_of(facts)
    targets = facts[-1].section("forward").get("targets", {})
    if "future" not in found or shift is None or "first" not in targets:
        return None
    rows = {int(row): moved for row, moved in found["future"].items()}
    asked = {r: m for r, m in rows.items() if targets["first"] <= r <= targets["last"]}
    if not asked:
        return None
    worst = max(asked, key=lambda row: asked[row])
    if asked[worst] <= _rounding(found):
        return []
    return [violated(row=worst, moved=asked[worst])]


@finds("check.influence_examples")
def influence_examples(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """One sequence of the batch moves the logits of others."""
    return _moves(facts, "examples")


@finds("check.influence_padding")
def influence_padding(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Tokens that the loop masks as padding move the logits of real ones, or their
    number does, where attention hides them."""
    found = _tried(facts)
    sites = facts[-1].section("forward").get("sites", {}).values()
    hidden = any(s.get("padding") and not s["to_padding"] for s in sites)
    if "shorter" in found and (hidden or "padding" in found):
        limit = OTHER * max(found["noise"], found["format"])
        if limit < found["shorter"]:
            return [violated(case="number", moved=found["shorter"])]
    if "padding" in found:
        return _moves(facts, "padding")
    return [] if hidden and "shorter" in found else None


@finds("check.influence_documents")
def influence_documents(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """A packed document moves the logits of those after it."""
    return _moves(facts, "documents")


@finds("check.no_positions")
def no_positions(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Two tokens change places, and nothing moves that their content would move."""
    if (alike := _alike(facts)) is not None:
        return [violated(case="alike", pairs=alike)] if alike else []
    found = _tried(facts)
    if "order" not in found or found["content"] <= 16 * _rounding(found):
        return None
    return [violated()] if found["order"] <= _rounding(found) else []


def _alike(facts: Sequence[Facts]) -> int | None:
    """Return pairs of places that the first attention cannot tell apart, if none is.

    0 where it can some, None where nothing can be said: in two samples, since what
    positions add may begin at zero. Learnt positions that get a gradient count.
    """
    found = [one.section("forward").get("alike", {}) for one in [*facts][-2:]]
    if found[-1].get("apart"):
        return 0
    if len(found) < 2 or not all(map(_same_everywhere, found)):
        return None
    return int(found[-1]["pairs"])


def _same_everywhere(alike: dict[str, Any]) -> bool:
    if not alike or alike["learnt"] or alike["apart"]:
        return False
    return bool(alike["pairs"] >= PAIRS and alike["others"])


@finds("check.not_repeatable")
def not_repeatable(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """In evaluation mode dropout still drops, so that no two passes agree."""
    found = _tried(facts)
    if "repeated" not in found:
        return None
    if found["repeated"] <= _rounding(found):
        return []
    if found["dropped"]:
        return [violated(moved=found["repeated"])]
    jitters = found.get("jittered")
    return [violated(case="router", moved=found["repeated"])] if jitters else []


@finds("check.eager_differs")
def eager_differs(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """A fused kernel and the same attention written out disagree."""
    found = _tried(facts)
    if "eager" not in found:
        return None
    rounding = max(found["noise"], found["format"], found["eager_noise"])
    limit = OTHER * rounding
    if limit >= 1:  # rounding alone may move all of the logits: nothing can be told
        return None
    return [violated(moved=found["eager"])] if found["eager"] > limit else []
