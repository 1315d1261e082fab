"""Checks of optimisers, clipping, schedules, batches and ranks."""

from collections.abc import Iterable, Sequence

from equipoise.judging.checks.registry import Violation, finds, violated
from equipoise.judging.facts import Facts, Section

LEAST_UPDATES = 8
"""Updates that one batch must span before it counts as the only one."""
LEAST_SAMPLES = 5


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
