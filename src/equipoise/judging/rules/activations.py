"""Activations: the residual stream, the norms that read it, and routers of experts."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from equipoise.judging.history import History, by_site, finite
from equipoise.judging.rules.registry import Measured, measured, measures
from equipoise.judging.rules.run import warms_up

COSINE, SIZE, KURTOSIS = "residual.token_cosine", "residual.B", "residual.kurtosis"
NORMED, GAIN = "attention.B", "norm.gain"
EPSILON = "precision.epsilon_dominated"
LOAD, TOKENS = "router.load", "router.tokens"


class StreamGrowth(NamedTuple):
    """How far a reading of one site has grown since the first sample."""

    site: str
    began: float
    now: float
    ratio: float


def growths(history: History, quantity: str, floor: float) -> list[StreamGrowth]:
    """Return how far each site has grown; growth up to the floor does not count."""
    track = history.track(quantity)
    if track.count < 2:
        return []
    began = {site: row[0] for site, row in by_site(track.first[0])}
    return [
        StreamGrowth(s, began[s], row[0], row[0] / max(began[s], floor))
        for s, row in by_site(track.recent[-1])
        if s in began and max(began[s], floor) > 0
    ]


def largest_growth(
    history: History, quantity: str, floor: float
) -> StreamGrowth | None:
    """Return the site that has grown most; None without any."""
    grown = growths(history, quantity, floor)
    return max(grown, key=lambda one: one.ratio) if grown else None


def at_extreme(
    history: History, quantity: str, pick: Callable[..., tuple[str, tuple[float, ...]]]
) -> Measured | None:
    """Return the latest value that ``pick`` (min or max) chooses, and its site."""
    reading = history.last(quantity)
    if reading is None or not reading.sites:
        return None
    site, row = pick(by_site(reading), key=lambda pair: pair[1][0])
    return measured(row[0], site)


@measures("residual.tokens_collapsed")
def tokens_collapsed(history: History) -> Measured | None:
    """Median over blocks of the mean cosine between tokens, once the rate has risen.

    What a model learns first is how frequent each class is: one direction, which all
    tokens share. In a long warm-up it is most of the stream.
    """
    if warms_up(history):
        return None
    reading = history.last(COSINE)
    values = finite([row[0] for row in reading.values]) if reading else []
    if reading is None or not values or history.track(COSINE).count < 10:
        return None
    site = max(by_site(reading), key=lambda pair: pair[1][0])[0]
    return measured(median(values), most_in=site, largest=max(values))


@measures("residual.growing")
def growing(history: History) -> Measured | None:
    """Largest growth of a block's stream since the first sample.

    A stream that begins below the size to which norms bring it may grow up to that.
    """
    first = history.track(NORMED).first
    sizes = [row[0] for row in first[0].values] if first else []
    floor = max(finite(sizes), default=0.0)
    grown = growths(history, SIZE, floor)
    if not grown:
        return None
    most, site = max(grown, key=lambda one: one.ratio), adds_most(grown)
    return measured(
        most.ratio,
        site,
        most_in=most.site,
        size=most.now,
        began=max(most.began, floor),
        source=f"{site or 'no single block'} adds most of it",
    )


def adds_most(grown: Sequence[StreamGrowth]) -> str:
    """Return the block behind which the growth, in logarithms, rises most.

    Nothing where no block makes half of it: then all of them grow, or what enters the
    first. The stream is read where a block begins, so a block's own part is behind it.
    """
    logs = [math.log(max(one.ratio, 1e-9)) for one in grown]
    steps = [after - before for before, after in pairwise(logs)]
    if not steps or max(steps) <= 0.5 * max(logs):
        return ""
    return grown[steps.index(max(steps))].site


@measures("residual.embedding_large")
def embedding_large(history: History) -> Measured | None:
    """Size of the stream that enters the first block over its size after the norm."""
    sizes, normed = history.last(SIZE), history.last(NORMED)
    if sizes is None or normed is None or not history.blocks:
        return None
    first, after = dict(by_site(sizes)).get(history.blocks[0]), dict(by_site(normed))
    inside = f"{history.blocks[0]}."
    below = [row[0] for site, row in after.items() if f"{site}.".startswith(inside)]
    if first is None or not below or not below[0] > 0:
        return None
    return measured(first[0] / below[0], history.blocks[0], size=first[0])


@measures("residual.outliers")
def outliers(history: History) -> Measured | None:
    """Largest kurtosis over blocks over its start, where that was not large already."""
    found = largest_growth(history, KURTOSIS, 3.0)
    if found is None:
        return None
    began = max(found.began, 3.0)
    return measured(3.0 * found.ratio, found.site, kurtosis=found.now, began=began)


@measures("norm.gain_high")
def gain_high(history: History) -> Measured | None:
    """Largest growth of a norm's gain since the first sample, where above 30."""
    found = largest_growth(history, GAIN, 3.0)
    if found is None:
        return None
    return measured(found.ratio, found.site, gain=found.now, began=found.began)


@measures("norm.epsilon_rules")
def epsilon_rules(history: History) -> Measured | None:
    """Largest share over norms of tokens whose variance is below ε."""
    return at_extreme(history, EPSILON, max)


@measures("router.certain")
def certain(history: History) -> Measured | None:
    """Smallest mean entropy of a router."""
    return at_extreme(history, "router.entropy", min)


@measures("mixer.not_written")
def not_written(history: History) -> list[Measured]:
    """Share of tokens that no head of a mixer writes, for each mixer that has a β."""
    return _of_every_head(history, "mixer.closed")


@measures("mixer.no_memory")
def no_memory(history: History) -> list[Measured]:
    """Share of tokens at which a mixer's every head keeps nothing, for each mixer."""
    return _of_every_head(history, "mixer.forgets")


def _of_every_head(history: History, quantity: str) -> list[Measured]:
    """Return, for each site, the smallest value over its heads: all reach at least it.

    NaN is compared as 0: what is not finite is for another rule.
    """
    rows = history.table(quantity)
    if not rows:
        return []
    least = {
        site: min(value if math.isfinite(value) else 0.0 for value in row)
        for site, row in rows.items()
    }
    site = max(least, key=lambda name: least[name])
    return [measured(least[site], site, heads=len(rows[site]))]


STARVED, BY_CHANCE = 0.1, 1e-3
"""Share of an equal load below which an expert is starved, and the probability of one
such expert in a router whose tokens all choose at random."""


def is_starved(share: float, tokens: float, experts: int) -> bool:
    """Whether an expert has few tokens, and fewer than even routing ever gives.

    Tokens that choose at random give an expert a Poisson number of them: of 32 tokens
    over 64 experts most experts get none, and nothing has collapsed.

    >>> is_starved(0.0, 32, 64), is_starved(0.0, 4096, 64)
    (False, True)
    """
    mean = tokens / experts
    if not share < STARVED / experts:
        return False
    term = total = math.exp(-mean)
    for count in range(1, round(share * tokens) + 1):
        term *= mean / count
        total += term
    return total < BY_CHANCE / experts


@measures("router.collapsed")
def collapsed(history: History) -> Measured | None:
    """Largest share over routers of experts starved beyond what chance explains."""
    tokens = history.table(TOKENS)
    loads = {s: row for s, row in history.table(LOAD).items() if row and s in tokens}
    if not loads:
        return None
    starved = {
        site: sum(is_starved(load, tokens[site][0], len(row)) for load in row)
        for site, row in loads.items()
    }
    site = max(starved, key=lambda name: starved[name] / len(loads[name]))
    count, experts = starved[site], len(loads[site])
    # One router names its layer; several are a fault of the whole model.
    like = sum(
        2 * starved[name] * experts >= count * len(loads[name]) for name in loads
    )
    return measured(
        count / experts,
        site if like == 1 else "",
        most_in=site,
        count=count,
        experts=experts,
        collapsed=like,
        routers=len(loads),
    )
