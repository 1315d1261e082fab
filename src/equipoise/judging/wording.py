"""What a verdict says: the cause in words, what began first, and what is over.

A reader has one minute. So the sentence begins with what somebody would change (the
learning rate, the start, the data), then says by what it was noticed.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from equipoise.judging.history import Curve, History
from equipoise.judging.rules.conditions import Condition
from equipoise.judging.rules.run import SPIKES, Spikes
from equipoise.judging.settings import Moved
from equipoise.records import Finding

STARTS = ("attention.projections_large", "residual.embedding_large")
"""Rules about what a run began with: a cause of whatever began together with it."""
LISTED = 3
"""Things that are over, in a sentence."""
PERIODIC = 4
"""Spikes from which on their distance may be called regular."""


def began_first(causes: Sequence[Finding]) -> Finding:
    """Return what went wrong first.

    Of what began together: how the model was made, then the gravest.
    """
    return min(causes, key=_onset)


def _onset(finding: Finding) -> tuple[int, bool]:
    return finding.since, finding.code not in STARTS


def plainest(finding: Finding) -> int:
    """That a loss is above chance says more than that it rose or does not fall."""
    said = ("loss.above_chance", "loss.risen", finding.code)
    return said.index(finding.code)


def explained(lead: Condition, moved: Moved | None) -> str:
    """Return the sentence of what began first, a setting that moved in front of it."""
    return f"{in_words(moved)}: {lead.sentence}" if moved else lead.sentence


def in_words(moved: Moved) -> str:
    """Return what a setting did, as a fact.

    >>> rate = {"setting": "learning_rate", "since": 140, "now": 0.3}
    >>> in_words(Moved(**rate, peak=0.001, peak_step=137))
    'the learning rate is 300 times its peak of step 137'
    """
    name = moved.setting.replace("_", " ")
    return f"the {name} is {moved.times:.3g} times its peak of step {moved.peak_step}"


def places(lead: Condition) -> tuple[str, str]:
    """Return the site at fault and the site in which one sees it, as things stand now.

    A stream that grows in one block begins as every stream does, in the first: the
    site at which a rule fired may be another.
    """
    if lead.latest is None:
        return "", ""
    found = lead.latest[1]
    return found.site, str(found.evidence.get("most_in") or found.site)


def is_episode(condition: Condition) -> bool:
    """Say whether the loss had gone wrong and has come back; a plateau is no wrong."""
    over = condition.reported is not None and condition.finding is None
    return over and condition.rule.name in ("loss.above_chance", "loss.risen")


def with_rate(advice: str, curve: Curve) -> str:
    """Return the advice with the learning rate it is about: its peak, and when.

    >>> with_rate("halve the learning rate", Curve())
    'halve the learning rate'
    """
    if "learning rate" not in advice.replace("_", " ") or not curve.count:
        return advice
    peak = f"peak {curve.largest:.3g}, reached at step {curve.largest_step}"
    return f"{advice} (learning rate: {peak})"


def what_is_over(conditions: Sequence[Condition], history: History) -> str:
    """Return what fired and is over, the earliest first, and where to look for it."""
    past = [c for c in conditions if c.reported is not None and c.finding is None]
    past = [c for c in past if c.rule.lasts and c.rule.severity != "info"]
    spikes: Spikes = history.recall(SPIKES) or Spikes()
    named = _jump(spikes, past)
    rest = [c for c in past if not (named and c.rule.about == "loss")]
    first = sorted(rest, key=lambda c: c.since)[: LISTED - len(named)]
    named += [_episode(condition) for condition in first]
    return "; ".join([*named, *_spikes(list(spikes.came_back))])


def _episode(condition: Condition) -> str:
    assert condition.reported is not None
    again = f", {condition.fired} times" * (condition.fired > 1)
    when = f"from step {condition.since} to {condition.ended}{again}"
    message = condition.reported.message.replace(" and has not come back", "")
    return f"{when}: {message}"


def _spikes(came_back: Sequence[int]) -> list[str]:
    """Return how often the loss jumped and came back, and how regularly.

    >>> _spikes([40, 80, 120, 161])
    ['4 spikes of the loss that came back, about every 40 steps, the last at step 161: \
the model is unharmed, look at those batches']
    """
    if not came_back:
        return []
    if len(came_back) == 1:
        return [f"one spike of the loss at step {came_back[0]} that came back"]
    gaps = [after - before for before, after in pairwise(came_back)]
    usual = median(gaps)
    regular = len(came_back) >= PERIODIC and max(
        abs(gap - usual) for gap in gaps
    ) <= max(2.0, usual / 8)
    every = f", about every {usual:.0f} steps" if regular else ""
    where = ": the model is unharmed, look at those batches" if regular else ""
    last = f"the last at step {came_back[-1]}"
    return [f"{len(came_back)} spikes of the loss that came back{every}, {last}{where}"]


def _jump(spikes: Spikes, past: Sequence[Condition]) -> list[str]:
    """Return where a loss that stayed up jumped, if nothing in the model came before.

    A model does not become twice as bad in one step without a sign: the data do.
    """
    back = max((c.ended for c in past if is_episode(c)), default=None)
    for step, before, after in spikes.stayed:
        signs = [c for c in past if c.rule.about == "model" and c.since < step]
        jumped = f"the loss jumped from {before:.3g} to {after:.3g} at step {step} with"
        if signs or after < 1.3 * before:
            continue
        if back is None:
            return [f"{jumped} no sign in the model: new data?"]
        if after > 1.5 * before:
            return [
                f"{jumped} no sign in the model before, and was back by step {back}: "
                "look at the data in between"
            ]
    return []
