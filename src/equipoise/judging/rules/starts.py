"""The first steps of a run: is it set up so that it can train?

These rules read what a pre-flight recorded in about twenty steps, and what the set-up
says (the schedule's peak rate): most starts look fine until the warm-up has ended.
"""

import math
from collections.abc import Iterator

from equipoise.judging.history import History
from equipoise.judging.rules.registry import Measured, measured, measures

STEPS = 20
"""Steps that make a start."""
LARGEST_UPDATE = 0.06
"""‖Δw‖/‖w‖ of a block in one step at the peak, as ``start.learning_rate`` has it."""
GRADIENTS = (0.1, 100.0)
"""Gradient norm of the first block over the last one's: 0.9 to 8.5 in survivors."""
NOTHING = 1e-9
"""Relative update that moves nothing."""


def values(history: History, quantity: str) -> Iterator[tuple[int, str, float]]:
    """Yield step, site and value of every finite number of a quantity."""
    for reading in history.track(quantity).recent:
        for site, row in zip(reading.sites, reading.values, strict=True):
            yield from ((reading.step, site, v) for v in row if math.isfinite(v))


def _peak(history: History) -> float:
    """Return the schedule's largest learning rate; NaN where it is not known."""
    return float(history.details.get("peak_lr", math.nan))


def _at_peak(history: History, quantity: str) -> Iterator[tuple[str, float, float]]:
    """Yield each site's value on the scale of the peak rate, and rate over value.

    The first step is left out: Adam's first update is as large as the rate allows.
    """
    peak = _peak(history)
    rates = {step: rate for step, _, rate in values(history, "learning_rate")}
    for step, site, value in values(history, quantity):
        rate = rates.get(step, math.nan)
        if step > 0 and value > 0:
            scale = peak / rate if rate > 0 and peak > rate else 1.0
            yield site, value * scale, rate / value


def updates_at_peak(history: History) -> dict[str, float]:
    """Return each block's largest relative update, on the scale of the peak rate."""
    found: dict[str, float] = {}
    for site, ratio, _ in _at_peak(history, "update.ratio"):
        found[site] = max(found.get(site, 0.0), ratio)
    return found


def largest_stable_rate(history: History) -> float:
    """Return the rate at which the largest update is just within the limit."""
    worst = max(updates_at_peak(history).values(), default=0.0)
    return _peak(history) * LARGEST_UPDATE / worst if worst > 0 else math.nan


def _most(found: dict[str, float]) -> str:
    return max(found, key=found.__getitem__)


@measures("start.learning_rate")
def learning_rate(history: History) -> Measured | None:
    """Largest ‖Δw‖/‖w‖ of a block in one step, at the schedule's peak."""
    updates = updates_at_peak(history)
    if not updates:
        return None
    site, peak = _most(updates), _peak(history)
    return measured(
        updates[site],
        site,
        update=updates[site],
        largest_stable=largest_stable_rate(history),
        peak=peak,
        case="unknown_peak" if math.isnan(peak) else "",
    )


@measures("start.sharpness")
def sharpness(history: History) -> Measured | None:
    """Sharpness over what SGD's peak rate allows; Adam's is no guide so early."""
    if "update.norm" in history:
        return None
    found = list(_at_peak(history, "curvature.edge_ratio"))
    if not found:
        return None
    site, ratio, stable = max(found, key=lambda one: one[1])
    return measured(ratio, site, ratio=ratio, largest_stable=stable)


@measures("start.logits")
def logits(history: History) -> Measured | None:
    """The largest attention logit of any head."""
    found = list(values(history, "attention.max_logit"))
    if not found:
        return None
    _, site, value = max(found, key=lambda one: one[2])
    return measured(value, site, logit=value)


@measures("start.saturated")
def saturated(history: History) -> Measured | None:
    """Largest share over the steps of heads whose median row has θ below 0.5."""
    heads: dict[int, list[float]] = {}
    for step, _, theta in values(history, "attention.theta.p50"):
        heads.setdefault(step, []).append(theta)
    shares = [sum(t < 0.5 for t in row) / len(row) for row in heads.values()]
    return measured(max(shares), share=max(shares)) if shares else None


@measures("start.gradient_ratio")
def gradient_ratio(history: History) -> Measured | None:
    """First block's gradient norm over the last one's, outside of 0.1 to 100."""
    low, high = GRADIENTS
    found = [
        (max(low / max(ratio, 1e-300), ratio / high), ratio, step)
        for step, _, ratio in values(history, "gradient.first_to_last")
    ]
    if not found:
        return None
    value, ratio, step = max(found, key=lambda one: one[0])
    case = "vanish" if ratio < low else "explode"
    return measured(value, ratio=ratio, at=step, case=case)


@measures("start.depth_scale")
def depth_scale(history: History) -> Measured | None:
    """Size of the residual stream after the last block over after the first."""
    found = []
    for reading in history.track("residual.B").recent:
        sizes = [max(row) for row in reading.values if row]
        if len(sizes) > 1 and sizes[0] > 0:
            found.append((sizes[-1] / sizes[0], reading.sites[-1]))
    if not found:
        return None
    growth, site = max(found)
    return measured(growth, site, growth=growth)


@measures("start.first_loss")
def first_loss(history: History) -> Measured | None:
    """First loss over that of equal probabilities."""
    classes = history.details.get("classes") or 0
    losses = [value for _, _, value in values(history, "loss")]
    if classes < 2 or not losses:
        return None
    even = math.log(classes)
    return measured(losses[0] / even, loss=losses[0], even=even)


@measures("start.adam_epsilon")
def adam_epsilon(history: History) -> Measured | None:
    """Smallest √v̂ of a tensor over Adam's ε."""
    found = {s: v for _, s, v in values(history, "optimizer.root_v_over_eps")}
    if not found:
        return None
    site = min(found, key=found.__getitem__)
    return measured(found[site], site, ratio=found[site])


@measures("start.epsilon")
def epsilon(history: History) -> Iterator[Measured]:
    """Infinite for a norm whose ε the weights' format stores as 0."""
    for _, site, stored in values(history, "start.epsilon"):
        yield measured(1.0 if stored else math.inf, site, stored=stored)


@measures("start.rounding")
def rounding(history: History) -> Measured | None:
    """Largest relative update over the round-off of weights without a wider copy."""
    roundoff = float(history.details.get("roundoff") or 0.0)
    moving = [u for u in updates_at_peak(history).values() if u > NOTHING]
    if not roundoff or not moving:
        return None
    return measured(max(moving) / roundoff, update=max(moving), roundoff=roundoff)
