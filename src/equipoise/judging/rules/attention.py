"""Attention: saturated, uniform, logits, entropy, sinks, dead heads, rounding error.

Levels of single heads say nothing: healthy models that were trained for long have heads
whose θ is 1e-7. What tells is how many heads at once, how early and how fast.
"""

import math
from statistics import median

from equipoise.judging.history import History, by_site, finite
from equipoise.judging.rules.registry import Measured, measured, measures
from equipoise.records import Reading

THETA, LOGIT = "attention.theta.p5", "attention.max_logit"
ENTROPY, SINK = "attention.entropy", "attention.sink"
ROUNDING, GAIN = "precision.rms_error.bf16", "projection.G"
SATURATED = 0.5
"""θ below which a row is saturated, as in ``start.saturated``."""
SHARED, DRAWN_ALIKE = 1 + 1e-6, 1.15
"""Largest over smallest G^¼ of layers that share weights, or are fresh: storms and
Hugging Face models begin at 1.01 to 1.07, the trained MiniLM has 1.31."""


def heads(reading: Reading) -> list[float]:
    """Return the values of all heads of all layers."""
    return [value for row in reading.values for value in row]


def heads_of(history: History, quantity: str) -> tuple[Reading, list[float]] | None:
    """Return the latest reading and the finite values in it, if there are any."""
    reading = history.last(quantity)
    values = finite(heads(reading)) if reading else []
    return (reading, values) if reading and values else None


def largest(reading: Reading) -> tuple[str, int, float]:
    """Return the site, the head and the value of the largest one."""
    most = [(max(row), site, row) for site, row in by_site(reading) if row]
    if not most:
        return "", 0, math.nan
    value, site, row = max(most, key=lambda one: one[0])
    return site, row.index(value), value


@measures("attention.saturated")
def saturated(history: History) -> Measured | None:
    """Median over heads of θ.p5: half of all heads have 5 % of rows below it."""
    if (found := heads_of(history, THETA)) is None:
        return None
    reading, values = found
    lowest = min(by_site(reading), key=lambda pair: median(pair[1] or (1.0,)))[0]
    value = median(values)
    started = history.track(THETA).first[0]
    if history.is_continued and median(finite(heads(started)) or [1.0]) < 0.2:
        return None  # it came like that, and it works
    return measured(value, most_in=lowest, heads=len(values), lowest_head=min(values))


@measures("attention.logits_large")
def logits_large(history: History) -> Measured | None:
    """The largest attention logit of any head that has saturated rows.

    A constant that is added to every logit of a row changes no weight: logits are large
    where they differ, and then softmax puts everything on one key.
    """
    thetas = history.table(THETA)
    found = [
        (logit if theta < SATURATED else 0.0, site, head)
        for site, row in history.table(LOGIT).items()
        for head, (logit, theta) in enumerate(zip(row, thetas.get(site, ())))  # noqa: B905
        if not math.isnan(logit)
    ]
    if not found:
        return None
    value, site, head = max(found)
    return measured(value, site, head=head)


@measures("attention.logits_growing")
def logits_growing(history: History) -> Measured | None:
    """Largest logit now over that of 16 readings ago, or over 5 if that is more.

    0 while most heads have no saturated rows: so heads form that a task needs.
    """
    track, thetas = history.track(LOGIT), heads_of(history, THETA)
    if track.count < 2 or thetas is None:
        return None
    if median(thetas[1]) > SATURATED:
        return measured(0.0)
    recent = list(track.recent)[-17:]
    site, _, now = largest(recent[-1])
    before = max(largest(recent[0])[2], 5.0)
    return measured(now / before, site, logit=now, readings=len(recent) - 1)


@measures("attention.entropy_collapsed")
def entropy_collapsed(history: History) -> Measured | None:
    """Median entropy over heads, over what it was at the first sample."""
    track = history.track(ENTROPY)
    if track.count < 2:
        return None
    now, first = finite(heads(track.recent[-1])), finite(heads(track.first[0]))
    began = median(first) if first else 0.0
    if not now or began <= 0:
        return None
    lowest = min(by_site(track.recent[-1]), key=lambda p: sum(p[1]) / len(p[1]))[0]
    value = median(now) / began
    return measured(value, most_in=lowest, entropy=median(now), began=began)


@measures("attention.sinks")
def sinks(history: History) -> Measured | None:
    """Median over heads of the mass on the first key."""
    if (found := heads_of(history, SINK)) is None:
        return None
    site, head, _ = largest(found[0])
    return measured(median(found[1]), site, head=head)


@measures("attention.dead_heads")
def dead_heads(history: History) -> Measured | None:
    """Share of heads in which even the best row passes no gradient to Q and K."""
    reading = history.last("attention.theta.p100")
    if reading is None:
        return None
    dead = [
        (s, h) for s, row in by_site(reading) for h, v in enumerate(row) if v < 1e-3
    ]
    count = len(heads(reading))
    if not count:
        return None
    site, head = dead[0] if dead else ("", 0)
    return measured(len(dead) / count, site, count=len(dead), heads=count, head=head)


@measures("attention.projections_large")
def projections_large(history: History) -> Measured | None:
    """Median over layers of G^¼ at the first sample, of a model that began untrained.

    G^¼ is the geometric mean of the norms of W_Q, W_K, W_V and W_O. Layers that were
    drawn alike have nearly the same one; training drives them apart, and layers that
    share weights have exactly the same: neither is judged.
    """
    first = history.track(GAIN).first
    sizes = [row[0] ** 0.25 for row in first[0].values if row[0] > 0] if first else []
    if history.is_continued or len(sizes) < 2:
        return None
    if not SHARED < max(sizes) / min(sizes) < DRAWN_ALIKE:
        return None
    return measured(median(sizes), largest=max(sizes))


@measures("precision.error")
def rounding_error(history: History) -> Measured | None:
    """Largest predicted relative error of a head in bf16."""
    reading = history.last(ROUNDING)
    if reading is None:
        return None
    pairs = [(v, s, h) for s, row in by_site(reading) for h, v in enumerate(row)]
    if not finite([v for v, _, _ in pairs]):
        return None
    value, site, head = max(p for p in pairs if p[0] == p[0])
    return measured(value, site, head=head)
