"""What is over: rules that fired and ended, spikes, and jumps of the loss."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from equipoise.judging.history import History
from equipoise.judging.rules.conditions import Condition
from equipoise.judging.rules.run import SMOOTH, SPIKES, Spikes, learnt
from equipoise.records import Finding

LISTED = 3
"""Rules and jumps that are over, in a verdict."""
PERIODIC = 4
"""Spikes from which on their distance may be called regular."""


def is_episode(condition: Condition) -> bool:
    """Whether the loss had gone wrong and has come back; a plateau is no wrong."""
    over = condition.reported is not None and condition.finding is None
    return over and condition.rule.name in ("loss.above_chance", "loss.risen")


def what_is_over(conditions: Sequence[Condition], history: History) -> list[Finding]:
    """Return what fired and is over, the earliest first, and where to look for it."""
    past = [c for c in conditions if c.over is not None]
    past = [c for c in past if c.rule.lasts and c.rule.severity != "info"]
    spikes: Spikes = history.recall(SPIKES) or Spikes()
    named = _jump(spikes, past)
    rest = [c for c in past if not (named and c.rule.about == "loss")]
    first = sorted(rest, key=lambda c: c.since)[: LISTED - len(named)]
    named += [c.over for c in first if c.over is not None]
    return [*named, *_spikes(list(spikes.came_back))]


def _spikes(came_back: Sequence[int]) -> list[Finding]:
    """Return how often the loss jumped and came back, and how regularly.

    >>> (found,) = _spikes([40, 80, 120, 161])
    >>> found.params["count"], found.params["apart"], found.params["last"]
    (4, 40, 161)
    """
    if not came_back:
        return []
    gaps = [after - before for before, after in pairwise(came_back)]
    last, count = came_back[-1], len(came_back)
    found = Finding.info(last, "loss.spikes", count=count, last=last)
    if count >= PERIODIC:
        usual = median(gaps)
        if max(abs(gap - usual) for gap in gaps) <= max(2.0, usual / 8):
            found.params.update(apart=round(usual), case="regular")
    if count == 1:
        found.params.update(case="one")
    return [found]


def _jump(spikes: Spikes, past: Sequence[Condition]) -> list[Finding]:
    """Return where a loss that stayed up jumped, if nothing in the model came before.

    A model does not become twice as bad in one step without a sign: the data do.
    """
    back = max((c.ended for c in past if is_episode(c)), default=None)
    for step, before, after in spikes.stayed:
        signs = [c for c in past if c.rule.about == "model" and c.since < step]
        if signs or after < 1.3 * before:
            continue
        jump = {"before": before, "after": after}
        if back is None:
            return [Finding.info(step, "loss.jumped", **jump)]
        if after > 1.5 * before:
            return [Finding.info(step, "loss.jumped", **jump, back=back, case="back")]
    return []


def jumped_before(
    history: History, conditions: Sequence[Condition], since: int
) -> Finding | None:
    """Return a jump of the loss that stayed, if nothing in the model came before it.

    A loss is that of the weights before the step: where no reading of the model moved,
    the batch did. A quarter of what was learnt must be lost at once.
    """
    spikes: Spikes = history.recall(SPIKES) or Spikes()
    now = [(spikes.began, spikes.before, spikes.first)] if spikes.began >= 0 else []
    for step, before, after in (*spikes.stayed, *now):
        signs = [
            c for c in conditions if c.rule.about == "model" and 0 <= c.since < step
        ]
        if step <= since + SMOOTH and not signs:
            if after - before > learnt(history) / 4:
                return Finding.info(step, "loss.jumped", before=before, after=after)
    return None
