"""Checks of weights and their gradients."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import isfinite, isnan
from typing import Any

from equipoise.judging.checks.registry import Violation, finds, violated
from equipoise.judging.facts import Facts, Section

Found = Iterable[Violation] | None
NARROW = ("bfloat16", "float16")
"""Formats in which most of the weights may stand still, while a few move."""
ROW = 3
"""Sampled steps in a row in which the same must be seen, where one could be chance."""


def optimizers(facts: Facts) -> Sequence[Mapping[str, Any]]:
    """Return the facts of each optimiser that steps the model, or was named."""
    each: Sequence[Mapping[str, Any]] = facts.section("optimizers").get("each", ())
    return each


def most_updates(facts: Facts) -> int:
    """Return the updates of the optimiser that was seen to step most."""
    return max((one["updates"] for one in optimizers(facts)), default=0)


def never_trained(facts: Facts) -> bool | None:
    """Return whether the weights were as initialised when watching began.

    Training moves some norm away from exactly 1 and 0. None without a norm, and where
    updates had been seen before.
    """
    norms = facts.section("start").get("norms", {})
    if not norms.get("count") or not norms["began"]:
        return None
    untouched = norms["untouched"] == norms["count"] and not norms.get("shifted")
    return bool(untouched)


def in_a_row(facts: Sequence[Facts], count: int) -> Sequence[Facts] | None:
    """Return the last sampled steps if they follow each other without a gap."""
    last = facts[-count:]
    steps = [one.step for one in last]
    closed = all(b == a + 1 for a, b in pairwise(steps))
    return last if len(last) == count and closed else None


@finds("check.no_gradient")
def no_gradient(facts: Sequence[Facts]) -> Found:
    """An optimiser steps, and no weight that it trains has a gradient; or none of a
    whole stack of blocks that ran."""
    if len(facts) < ROW:
        return None
    found = [
        violated(optimizer=kind)
        for kind in sorted({one["class"] for one in optimizers(facts[-1])})
        if all(_without_gradient(one, kind) for one in facts[-ROW:])
    ]
    return found or [
        violated(stack, severity="warn", case="stack", weights=now["weights"])
        for stack, now in facts[-1].section("reach").get("stacks", {}).items()
        if _is_cut_off([one.section("reach") for one in facts[-ROW:]], stack)
    ]


def _is_cut_off(reach: Sequence[Section], stack: str) -> bool:
    """Return whether a stack ran and had no gradient, each time, and nothing wrote to
    it: a moving average of another part is written to."""
    seen = [one.get("stacks", {}).get(stack, {}) for one in reach]
    if not all(one and one["held"] == one["weights"] > 0 for one in seen):
        return False
    return not any(s["graded"] for s in seen) and len({s["mark"] for s in seen}) == 1


def _without_gradient(facts: Facts, kind: str) -> bool:
    same = [one for one in optimizers(facts) if one["class"] == kind]
    stepped = [one for one in same if one["stepped"] and one["trainable"]]
    kept = [one.get(when, {}) for one in stepped for when in ("before", "after")]
    return bool(stepped) and not any(some.get("gradients", 1) for some in kept)


@finds("check.not_optimised")
def not_optimised(facts: Sequence[Facts]) -> Found:
    """Trainable weights get gradients, and no optimiser of the process holds them."""
    unheld = facts[-1].section("optimizers")["unheld"]
    held = unheld["trainable"] - unheld["parameters"]
    if most_updates(facts[-1]) < 2:
        return None
    if not held:
        # Of this model the optimiser holds what is frozen, and nothing that is not.
        return _only_frozen_held(facts)
    few = unheld["parameters"] < held
    # A trained backbone, left to itself, under a new head: slow, but meant; not what
    # the loop has unfrozen itself.
    probing = never_trained(facts[-1]) is False and not few and not unheld["unfrozen"]
    one_vector = not unheld["matrices"] and unheld["count"] < 2
    if not unheld["with_gradient"] or probing or one_vector:
        return []
    return [_left_out(unheld)]


def _left_out(unheld: Section) -> Violation:
    share = unheld["parameters"] / unheld["trainable"]
    names = ", ".join(unheld["names"])
    site = unheld["names"][0]
    return violated(site, share=share, count=unheld["count"], names=names)


def _only_frozen_held(facts: Sequence[Facts]) -> Found:
    """Every optimiser's weights of this model are frozen, and others get gradients."""
    if len(facts) < 2 or _written(facts):
        return None
    for one in facts[-2:]:
        unheld = one.section("optimizers")["unheld"]
        holds = any(o["parameters"] and o["updates"] for o in optimizers(one))
        alone = unheld["parameters"] == unheld["trainable"]
        if not (holds and alone and unheld["with_gradient"]):
            return None
    return [_left_out(facts[-1].section("optimizers")["unheld"])]


def _written(facts: Sequence[Facts]) -> bool:
    """Return whether something writes to the weights, if by hand."""
    return len({one.section("weights").get("writes") for one in facts[-2:]}) > 1


@finds("check.foreign_parameters")
def foreign_parameters(facts: Sequence[Facts]) -> Found:
    """No optimiser holds a weight of the model, and nothing writes to its weights."""
    if len(facts) < 2 or most_updates(facts[-1]) < 2:
        return None
    each, unheld = optimizers(facts[-1]), facts[-1].section("optimizers")["unheld"]
    if any(one["parameters"] for one in each) or not unheld["trainable"]:
        return []
    if _written(facts):
        return []
    stepping = [one for one in each if one["updates"] and one["foreign"]]
    return [
        violated(optimizer=one["class"], parameters=one["foreign"])
        for one in stepping[:1]
    ]


@finds("check.no_movement")
def no_movement(facts: Sequence[Facts]) -> Found:
    """Most of the weights have gradients and rates above 0, and have never moved."""
    now = facts[-1].section("weights")
    share = _still(now)
    if share is None:
        return None
    dtypes = now["dtypes"]
    kind = max(dtypes, key=lambda name: dtypes[name])
    most = 0.5 if kind in NARROW else 1.0 - 1e-9
    if share <= most:
        return []
    seen = [one.section("weights") for one in facts]
    asked = [one for one in seen if "moves" in one]
    rates = [one["moves"]["rate"] for one in asked]
    rising = any(b > a * (1 + 1e-9) for a, b in pairwise(rates))
    from_the_start = seen[0].get("sample") == 0
    if not from_the_start or len(asked) < ROW or rising:
        return None
    if any((_still(one) or 0.0) <= most for one in asked):
        return None
    return [violated(share=share, rate=rates[-1], dtype=kind)]


def _still(weights: Section) -> float | None:
    """Return the share of the weights with a gradient that an update left in place."""
    moves = weights.get("moves")
    if moves is None:
        return None
    rows = list(zip(moves["asked"], moves["moved"], moves["numbers"], strict=True))
    asked = sum(numbers for active, _, numbers in rows if active)
    still = sum(n for active, moved, n in rows if active and not moved)
    return still / asked if asked else None


@finds("check.stale_gradient")
def stale_gradient(facts: Sequence[Facts]) -> Found:
    """What an update used was still there when the next one's gradients were added."""
    weights = facts[-1].section("weights")
    if not weights["checked_left_over"]:
        return None
    left = weights.get("left_over", {"names": (), "left": ()})
    pairs = zip(left["names"], left["left"], strict=True)
    names = [name for name, still in pairs if still]
    if not names:
        return []
    everywhere = sum(map(bool, left["left"])) >= 0.9 * len(left["names"])
    few = ", ".join(names[:3])
    return [violated(count=len(names), names=few, everywhere=everywhere)]


@finds("check.moments_reset")
def moments_reset(facts: Sequence[Facts]) -> Found:
    """At three updates in a row an optimiser that makes moments had none before."""
    last = in_a_row(facts, ROW)
    if last is None:
        return None
    return [violated()] if all(map(_begins_anew, last)) else []


def _begins_anew(facts: Facts) -> bool:
    stepped = [one for one in optimizers(facts) if one["stepped"]]
    made = [one for one in stepped if one.get("after", {}).get("moments")]
    return bool(made) and not any(one["before"]["moments"] for one in stepped)


@finds("check.untied")
def untied(facts: Sequence[Facts]) -> Found:
    """The configuration ties input and output embedding, and two weights are there."""
    tie = facts[-1].section("start").get("tie", {})
    if "shared" not in tie:
        return None
    broken = tie["promised"] and not tie["shared"]
    return [violated(tie["head"])] if broken else []


@finds("check.not_loaded")
def not_loaded(facts: Sequence[Facts]) -> Found:
    """A state in memory fits the model under other names, which was never trained."""
    prefix = facts[-1].section("start").get("unloaded")
    if prefix is None or never_trained(facts[-1]) is None:
        return None
    more = not prefix.startswith("-")
    case = "more" if more else "less"
    return [violated(case=case, prefix=prefix.removeprefix("-"))]


@finds("check.nonfinite_parameters")
def nonfinite_parameters(facts: Sequence[Facts]) -> Found:
    """A weight that is trained is not finite, or any weight or buffer is NaN.

    A frozen weight, and a buffer, may be minus infinity: masks are.
    """
    largest = facts[-1].section("weights").get("largest")
    if not largest:
        return None
    rows = zip(largest["names"], largest["values"], largest["trained"], strict=True)
    bad = [n for n, x, trained in rows if isnan(x) or (trained and not isfinite(x))]
    nan = zip(largest.get("buffers", ()), largest.get("nan", ()), strict=True)
    bad += [name for name, count in nan if count]
    if not bad:
        return []
    return [violated(bad[0], count=len(bad), names=", ".join(bad[:3]))]


@finds("check.zero_parameters")
def zero_parameters(facts: Sequence[Facts]) -> Found:
    """Two maps in a row stay all zero: neither gives the other a gradient."""
    seen = [one.section("weights").get("largest") for one in facts]
    known = [one for one in seen if one]
    if not seen[-1] or known[-1]["updates"] < ROW:
        return None
    before = [one for one in known if one["updates"] <= known[-1]["updates"] - 2]
    if not before:
        return None
    zero = _zero_maps(known[-1])
    stayed = {name: zero[name] for name in zero if name in _zero_maps(before[0])}
    pairs = [
        (into, out)
        for into, (rank, _) in stayed.items()
        for out, (_, given) in stayed.items()
        if rank == given and into != out
    ]
    if not pairs:
        return []
    into, out = pairs[0]
    return [violated(into, second=out, count=len(stayed))]


def _zero_maps(largest: Section) -> dict[str, Sequence[int]]:
    """Return name and shape of the trained matrices that are all 0."""
    columns = ("names", "values", "shapes", "trained", "with_gradient")
    rows = zip(*(largest[name] for name in columns), strict=True)
    return {
        name: shape
        for name, value, shape, trained, gradient in rows
        if value == 0 and len(shape) == 2 and trained and gradient
    }


@finds("check.frozen_random")
def frozen_random(facts: Sequence[Facts]) -> Found:
    """Most matrices of the blocks are frozen, and nothing was ever trained."""
    frozen = facts[-1].section("start").get("frozen", {})
    fresh = never_trained(facts[-1])
    if not frozen.get("matrices") or fresh is None:
        return None
    still = frozen["since_start"] / frozen["matrices"]
    trained = facts[-1].section("weights").get("trained", 0)
    if not fresh or still <= 0.5 or not trained:
        return []
    return [violated(frozen["names"][0], share=still)]


@finds("check.replicas_differ")
def replicas_differ(facts: Sequence[Facts]) -> Found:
    """Ranks hold different weights where a wrapper, or equal gradients, say that they
    are replicas, or where they were alike before beside the shards of one mesh."""
    each = _replicas(facts[-1])
    if not each:
        return None
    before = (
        [] if each[0]["wrapper"] else [s for f in facts[:-1] for s in [_replicas(f)]]
    )
    alike = bool(each[0]["wrapper"]) or _gradients_alike(each)
    for place, name in enumerate(each[0]["names"]):
        rank = _apart(each, place)
        were = [_apart(one, place) for one in before if one]
        drifted = each[0].get("one_mesh") and None in were
        if rank is not None and (alike or drifted):
            return [violated(name, rank=rank, ranks=len(each))]
    return []


def _replicas(facts: Facts) -> Sequence[Section]:
    """Return what each rank holds; nothing unless all name the same weights."""
    each = [s for s in facts.each("replicas") if "weights" in s]
    same = len({tuple(s["names"]) for s in each}) == 1
    return each if len(each) == len(facts.ranks) > 1 and same else ()


def _apart(each: Sequence[Section], place: int) -> int | None:
    """Return the first rank that holds other numbers than the first; None if none."""
    values = [s["weights"][place] for s in each]
    apart = [rank for rank, x in enumerate(values) if x != values[0]]
    return apart[0] if apart and not any(map(isnan, values)) else None


def _gradients_alike(each: Sequence[Section]) -> bool:
    """Return whether all ranks step by the same gradients, which they have averaged."""
    found = [tuple(s.get("gradients", ())) for s in each]
    return any(found[0]) and all(one == found[0] for one in found)
