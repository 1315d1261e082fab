"""Checks of optimisers, clipping, schedules, batches and ranks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from equipoise.judging.checks.registry import Violation, finds, violated
from equipoise.judging.facts import Facts, Section

Found = Iterable[Violation] | None
Moved = Mapping[str, Any]
ROW = 2
"""Updates in a row that a schedule must go wrong at."""
UNSCHEDULED, AT_ZERO, OVER = 3, 8, 16
"""Updates in a row at a rate of 0: without a schedule, with one, once it was above 0.
"""
LEAST_UPDATES = 8
"""Updates that one batch must span before it counts as the only one."""
LEAST_SAMPLES = 5


@finds("check.clip_before_unscale")
def clip_before_unscale(facts: Sequence[Facts]) -> Found:
    """Gradients that are clipped still carry the scaler's factor."""
    factor = facts[-1].section("scaler").get("factor", 1.0)
    each = facts[-1].section("clipping")["each"]
    # A loop may clip scaled gradients by a limit that it has scaled as well.
    wrong = [c for c in each if c["scaled"] and c["largest"] < 0.05 * factor]
    if factor == 1.0 or not wrong:
        return []
    return [violated(factor=factor, limit=wrong[0]["largest"])]


@finds("check.clip_norm")
def clip_norm(facts: Sequence[Facts]) -> Found:
    """The norm that a loop clips by is smaller than that of what it clips.

    A larger one may be of all ranks, or of all groups. The largest entry is a norm of
    another order, which a loop may have asked for.
    """
    clipping = facts[-1].section("clipping")
    if clipping.get("of_nothing") and not clipping["calls"] and clipping["passes"]:
        return [violated(case="nothing", calls=clipping["of_nothing"])]
    if (apart := _norms_apart(facts[-1])) is not None:
        return [apart]
    given = [call for call in clipping["each"] if "own" in call]
    if not given:
        return [] if clipping["calls"] else None
    wrong = [call for call in given if _too_small(call)]
    return [violated(norm=c["norm"], own=c["own"]) for c in wrong[:1]]


def _norms_apart(facts: Facts) -> Violation | None:
    """Ranks scale shards of the same weights, each by a norm of its own."""
    each = [one["each"] for one in facts.each("clipping") if one.get("each")]
    if len(each) < 2 or len({len(calls) for calls in each}) > 1:
        return None
    for calls in zip(*each, strict=True):
        norms = [float(call["norm"]) for call in calls]
        if all(call.get("sharded") for call in calls) and _differ(norms):
            least, most = min(norms), max(norms)
            return violated(case="shard", norm=least, own=most, ranks=len(norms))
    return None


def _differ(norms: Sequence[float]) -> bool:
    """Return whether one norm is not another by more than rounding."""
    return max(norms) - min(norms) > 1e-4 * max(norms)


def _too_small(call: Mapping[str, Any]) -> bool:
    error = max(1e-4, 8 * call["precision"])
    other = abs(call["norm"] - call["own_largest"]) <= error * call["own_largest"]
    smaller: bool = call["norm"] < (1 - error) * call["own"]
    return smaller and not other


@finds("check.clip_unused")
def clip_unused(facts: Sequence[Facts]) -> Found:
    """All clipping of a step comes before the first backward pass of it."""
    clipping = facts[-1].section("clipping")
    calls, before = clipping["calls"], clipping["before_backward"]
    if not calls or not clipping["passes"]:
        return None
    return [violated(limit=clipping["each"][0]["largest"])] if before == calls else []


@finds("check.schedule")
def schedule(facts: Sequence[Facts]) -> Found:
    """A rate that goes several steps an update, none at all, or back to its start."""
    section = facts[-1].section("schedule")
    found = [_several(one, len(facts[-1].ranks)) for one in section["moves"]]
    found += [_of_another(one) for one in section["moves"]]
    found += [_again(one) for one in section["rates"]]
    found.append(_at_zero(section["rates"]))
    return [one for one in found if one is not None][:1]


def _several(moved: Moved, ranks: int) -> Violation | None:
    """Moves per update that are not one for each rank, nor one for each micro-batch."""
    each, passes = moved["each"][-ROW:], moved["passes"][-ROW:]
    if len(each) < ROW or min(each) < 2 or len(set(each)) > 1:
        return None
    if any(count % ranks == 0 for count in each if ranks > 1) or each == passes:
        return None
    return violated(case="several", schedule=moved["class"], moves=each[-1])


def _of_another(moved: Moved) -> Violation | None:
    """It moves an optimiser that never steps, beside one with the same weights."""
    rare = moved["total"] < ROW or moved["instead"] < ROW or moved["updates"]
    if rare or moved["instead_rates"] > 1:
        return None
    return violated(case="other", schedule=moved["class"], moves=moved["total"])


def _again(rates: Moved) -> Violation | None:
    if not rates["restarts"]:
        return None
    last = rates["restarts"][-1]
    at, end, before, rate = (last[name] for name in ("at", "end", "before", "rate"))
    return violated(
        case="again", schedule=last["kind"], at=at, end=end, before=before, rate=rate
    )


def _at_zero(rates: Sequence[Moved]) -> Violation | None:
    """All optimisers of the model step with a rate of 0."""
    stepping = [one for one in rates if one["updates"]]
    if not stepping:
        return None
    began = not any(one["was_above_zero"] for one in stepping)
    scheduled = any(one["scheduled"] for one in stepping)
    least = OVER if not began else AT_ZERO if scheduled else UNSCHEDULED
    updates = min(one["at_zero"] for one in stepping)
    if updates < least:
        return None
    return violated(case="zero", updates=updates, began=began)


@finds("check.other_optimizer")
def other_optimizer(facts: Sequence[Facts]) -> Found:
    """One that was not named steps the weights of one that was, and never steps."""
    each = facts[-1].section("optimizers")["each"]
    others = [o for o in each if o["in_place_of_named"] and o["updates"] > 1]
    named = [one["class"] for one in each if one["named"]]
    return [violated(optimizer=o["class"], named=", ".join(named)) for o in others[:1]]


@finds("check.wrapper_bypassed")
def wrapper_bypassed(facts: Sequence[Facts]) -> Found:
    """The model inside the wrapper is called, and ranks step by different gradients."""
    each = [s for s in facts[-1].each("replicas") if "gradients" in s]
    if len(each) < 2:
        return None
    past = all(
        s["called"].get("model") and not s["called"].get("wrapper") for s in each
    )
    apart = len({tuple(s["gradients"]) for s in each}) > 1
    return [violated(wrapper=each[0]["wrapper"])] if past and apart else []


@finds("check.same_batch")
def same_batch(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """The last sampled steps do not all have one batch that is made again each time.

    Two of them must follow each other: a loader without a shuffle comes back to the
    same batch after an epoch. A batch that stays where it is in memory is one that the
    loop keeps on purpose: a full batch, or the epochs of PPO.
    """
    batches = [(one.step, one.section("batch")) for one in facts]
    step, last = batches[-1]
    if len(batches) < 2 or "hash" not in last:
        return None
    same = [step]
    for earlier, batch in reversed(batches[:-1]):
        if batch.get("hash") != last["hash"]:
            break
        same.insert(0, earlier)
    if len(same) == 1:
        return []
    again = [batch for at, batch in batches if at in same[1:]]
    if any(batch.get("kept") or batch.get("whole") for batch in again):
        return None
    adjacent = any(b - a == 1 for a, b in zip(same, same[1:], strict=False))
    updates = same[-1] - same[0] + 1
    if len(same) < LEAST_SAMPLES or updates < LEAST_UPDATES or not adjacent:
        return None
    return [violated(updates=updates)]


@finds("check.same_batch_ranks")
def same_batch_ranks(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Data-parallel ranks have different batches in one of two sampled steps."""
    found = [_batch_of_ranks(one.each("batch")) for one in [*facts][-2:]]
    if found[-1] is None:
        return None
    if found[-1] is False:
        return []
    if len(found) < 2 or not found[0]:
        return None
    return [violated(ranks=len(facts[-1].ranks))]


def _batch_of_ranks(ranks: Sequence[Section]) -> bool | None:
    """Return whether all ranks have one batch; None where they may, or are not read."""
    if len(ranks) < 2 or any("hash" not in rank for rank in ranks):
        return None
    if any(rank.get("parallel") != "data" for rank in ranks):
        return None
    if all(rank.get("kept") for rank in ranks):
        return None
    return all(rank["hash"] == ranks[0]["hash"] for rank in ranks)
