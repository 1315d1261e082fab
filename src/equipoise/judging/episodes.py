"""What is over: rules that fired and ended, spikes, and jumps of the loss."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from equipoise.judging.history import History
from equipoise.judging.rules.conditions import Condition
from equipoise.judging.rules.run import SMOOTH, SPIKES, START, Jump, Spikes, learnt
from equipoise.records import Finding

LISTED = 3
"""Rules and jumps that are over, in a verdict."""
PERIODIC = 4
"""Spikes from which on their distance may be called regular, or batches many."""
RUNS_ON = 1.5
"""Factor by which a loss that jumped is exceeded where it goes on rising: a batch that
is different is so at once, give or take the noise of the next ones."""


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
    for step, before, after, _ in spikes.stayed:
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
    """Return a jump of the loss that a batch must have made, before a step.

    A loss is that of the weights before the step: where no reading of the model moved,
    the batch did. A quarter of what was learnt must be lost at once. A loss that goes
    on rising is the training's own.
    """
    spikes: Spikes = history.recall(SPIKES) or Spikes()
    now = [spikes.jump] if spikes.began >= 0 else []
    at_once = [
        jump
        for jump in (*spikes.stayed, *now)
        if jump.highest - jump.before < RUNS_ON * (jump.after - jump.before)
    ]
    for count, jump in (*((1, j) for j in at_once), *_bursts(list(spikes.of_batches))):
        rise = jump.after - jump.before
        if jump.step <= since + SMOOTH and rise > learnt(history) / 4:
            if not any(_was_before(condition, jump.step) for condition in conditions):
                return _of_the_batch(jump, count)
    return None


def _bursts(jumps: Sequence[Jump]) -> Iterator[tuple[int, Jump]]:
    """Yield how many jumps come close together, and the first of them."""
    for first, jump in enumerate(jumps):
        close = sum(one.step < jump.step + START for one in jumps[first:])
        if close >= PERIODIC:
            yield close, jump


def _was_before(condition: Condition, step: int) -> bool:
    """Whether something in the model was wrong before a step, and still then."""
    lasts = condition.phase != "quiet" or condition.ended >= step
    return condition.rule.about == "model" and lasts and 0 <= condition.since < step


def _of_the_batch(jump: Jump, count: int) -> Finding:
    several = {"case": "several", "count": count} if count > 1 else {}
    jumped = {"before": jump.before, "after": jump.after}
    return Finding.info(jump.step, "loss.jumped", **jumped, **several)
