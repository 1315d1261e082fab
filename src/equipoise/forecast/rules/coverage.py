"""Coverage: readings that stop, and ranks that disagree."""

from equipoise.forecast.history import History
from equipoise.forecast.rules.registry import Measured, measured, rule

WATCHED = ("attention.theta.p50", "gradient.norm")


@rule(
    "coverage.stopped",
    reads="loss",
    above=0.0,
    persist=1,
    recover=1,
    about="watching",
    scope="layer",
    source="a reading that stops while training goes on is a gap, not a zero",
    message="{what} is not read any more: its last reading is of step {last}, and the "
    "run is at step {now}",
)
def stopped(history: History) -> Measured | None:
    """1 where a reading is overdue by ten of its own intervals."""
    for quantity in WATCHED:
        track = history.track(quantity)
        if len(track.recent) < 3:
            continue
        last, before = track.recent[-1].step, track.recent[-2].step
        if history.step - last > 10 * max(1, last - before) + 64:
            return measured(1.0, what=quantity, last=last, now=history.step)
    return measured(0.0, what="", last=0, now=history.step)


@rule(
    "ranks.disagree",
    reads="ranks.disagreement",
    above=0.01,
    persist=2,
    scope="rank",
    applies="several ranks",
    source="theory: replicas start equal and take equal steps",
    message="the ranks' copies of the weights differ by {value:.2g}: they train "
    "different models",
    remedies=("roll_back",),
)
def disagree(history: History) -> Measured | None:
    """Largest relative difference between ranks of a replicated weight's norm."""
    value = history.scalar("ranks.disagreement")
    return None if value is None else measured(value)
