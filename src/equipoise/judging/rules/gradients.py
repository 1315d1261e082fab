"""Gradients over depth and time, the updates they make, and the learning rate."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from equipoise.judging.history import BLOCK, History, by_site
from equipoise.judging.rules.registry import Measured, measured, measures
from equipoise.judging.rules.weights import role
from equipoise.judging.settings import AMOUNTS, change, growth

NORM, TOTAL, QK = "gradient.norm", "gradient.norm.total", "gradient.qk"
RATIO, MOVED, RATE = "update.ratio", "update.norm", "learning_rate"
WEIGHT = "weight.norm"
EDGE = "curvature.edge_ratio"
Named = tuple[str, float]
"""A site and its value."""


def by_depth(history: History) -> list[Named]:
    """Return the gradient norm of each block that was read, in order of depth.

    A frozen block has no reading. Blocks of which only an adapter is trained are all
    alike. So neither counts as vanished.
    """
    reading = history.last(NORM)
    norms = dict(by_site(reading)) if reading else {}
    return [(block, norms[block][0]) for block in history.blocks if block in norms]


def early_and_late(
    history: History, early: Callable[..., Named], late: Callable[..., Named]
) -> list[tuple[Named, Named]]:
    """Return, of each stack, one block of its first half and one of its second.

    An encoder and a decoder are two stacks: between them the gradient passes through
    cross-attention, which has nothing to read at first.
    """
    stacks: dict[str, list[Named]] = {}
    for block, norm in by_depth(history):
        stacks.setdefault(role(block), []).append((block, norm))
    found = []
    for norms in stacks.values():
        middle = (len(norms) + 1) // 2
        if len(norms) > 1:
            first = early(norms[:middle], key=lambda pair: pair[1])
            second = late(norms[middle:], key=lambda pair: pair[1])
            found.append((first, second))
    return [pair for pair in found if pair[1][1] > 0]


@measures("gradient.vanished")
def vanished(history: History) -> Measured | None:
    """Smallest norm in the first half of the blocks over the largest in the second."""
    pairs = early_and_late(history, min, max)
    if not pairs:
        return None
    (site, norm), (largest, most) = min(pairs, key=lambda pair: pair[0][1] / pair[1][1])
    return measured(norm / most, site, norm=norm, largest=largest, largest_norm=most)


@measures("gradient.exploding")
def exploding(history: History) -> Measured | None:
    """Largest norm in the first half of the blocks over the smallest in the second."""
    pairs = early_and_late(history, max, min)
    if not pairs:
        return None
    (site, norm), (least, small) = max(pairs, key=lambda pair: pair[0][1] / pair[1][1])
    return measured(norm / small, site, least=least, norm=norm)


@measures("gradient.spike")
def spike(history: History) -> Measured | None:
    """Norm of the whole gradient over the median of those kept before it.

    0 where the norm usually scatters as far: over small batches, and at the end of a
    task that is solved, it does. While it is high, the median stays that of before.
    The median of the last 16 counts too: where a task is being solved, the norm grows
    tenfold in a hundred steps.
    """
    curve = history.curve(TOTAL)
    if curve.count < 16 or not curve.usual > 0:
        return None
    before = history.memory("gradient.spike", UsualNorm)
    norm = curve.values[-1]
    if not norm > HIGH * before.norm:
        latest = median(curve.tail(LATEST + 1)[:-1])
        before.norm, before.scatter = max(curve.usual, latest), None
    value = norm / before.norm
    if value > HIGH:
        if before.scatter is None:
            before.scatter = _scatter(curve.tail(64)[:-1])
        if math.log(value) <= SCATTERS * before.scatter:
            value = 0.0
    return measured(value, norm=norm, usual=before.norm)


HIGH = 2.5
"""Factor above the usual norm that is not learnt as usual; the rule's ``release``."""
LATEST = 16
"""Steps whose median follows a norm that grows slowly."""


@dataclass(slots=True)
class UsualNorm:
    """The median norm when it was last not high, and its scatter once it is high."""

    norm: float = math.inf
    scatter: float | None = None


SCATTERS = 6.0
"""Robust standard deviations of ln norm within which a norm is usual."""


def _scatter(norms: list[float]) -> float:
    """Return the usual step of ln norm between neighbours, as a Gaussian's σ.

    Steps and not distances from the median, so that a trend does not count.
    """
    logs = [math.log(norm) for norm in norms if 0 < norm < math.inf]
    steps = [abs(after - before) for before, after in pairwise(logs)]
    return 1.4826 * median(steps) / math.sqrt(2) if steps else 0.0


def over_start(
    history: History, name: str, now: dict[str, float], *, skip: int = 0, count: int
) -> dict[str, float]:
    """Return each site's value over the median of its first ones.

    Of a site's first ``count`` values the first ``skip`` are left out; a site with
    fewer values than ``count`` is not compared yet.
    """
    seen = history.memory(name, dict)
    for site, value in now.items():
        kept = seen.setdefault(site, [])
        if len(kept) < count:
            kept.append(value)
    began = {s: median(seen[s][skip:]) for s in now if len(seen[s]) == count}
    return {s: now[s] / began[s] for s in began if began[s] > 0}


@measures("gradient.qk_starved")
def qk_starved(history: History) -> Measured | None:
    """Median over layers of Q's and K's share of the gradient, over its start.

    A share, because all gradients shrink as a loss goes to zero.
    """
    now, total = history.last(QK), _total(history)
    if now is None or not total > 0:
        return None
    shares = {site: row[0] / total for site, row in by_site(now)}
    ratios = over_start(history, "gradient.qk_starved", shares, count=6)
    if not ratios:
        return None
    lowest = min(ratios, key=lambda site: ratios[site])
    value = median(ratios.values())
    return measured(value, most_in=lowest, lowest=ratios[lowest])


def _total(history: History) -> float:
    """Return the norm over all that was read of the gradient at the last sample."""
    reading = history.last(NORM)
    rows = reading.values if reading is not None else ()
    return math.sqrt(sum(row[0] ** 2 for row in rows))


def by_block(history: History, quantity: str) -> dict[str, float]:
    """Return the latest value of each block; of every site where blocks are unknown."""
    reading = history.last(quantity)
    rows = {site: row[0] for site, row in by_site(reading)} if reading else {}
    blocks = {block: rows[block] for block in history.blocks if block in rows}
    return blocks or rows


def of_median_block(values: dict[str, float]) -> Measured | None:
    """Return the median over blocks, with the block of the largest value."""
    if not values:
        return None
    site = max(values, key=lambda name: values[name])
    return measured(median(values.values()), most_in=site, largest=values[site])


@measures("update.too_large")
def too_large(history: History) -> Measured | None:
    """Median over blocks of ‖Δw‖/‖w‖, of orthogonalised steps a third of it.

    A step along the gradient has few directions. One that is orthogonalised has as much
    in all of them, so by the largest singular value it is some √(width/rank) smaller.
    """
    ratios = by_block(history, RATIO)
    if "orthogonalised" in history.details.get("updates", ()):
        ratios = {site: EVEN * ratio for site, ratio in ratios.items()}
    return of_median_block(ratios)


EVEN = 0.3
"""Singular value of an orthogonalised step over the largest of a gradient's of the
same norm, of about 5 directions that count in a width of 64 or more."""


@measures("update.lost")
def lost(history: History) -> Measured | None:
    """Median over blocks of the share of weights that did not change in an interval."""
    ratios, same = by_block(history, RATIO), by_block(history, "update.unchanged")
    return of_median_block({s: v for s, v in same.items() if ratios.get(s, 0.0) > 1e-6})


@measures("update.too_small")
def too_small(history: History) -> Measured | None:
    """Median over blocks of ‖Δw‖/rate over its start, and over that of the gradient.

    Only of optimisers that divide by a second moment. A gradient that shrinks takes the
    update with it, since √v follows late: that is convergence, and not counted. The
    rest is judged beside √((1−β₁)/(1+β₁)), to which an average over noise falls.
    """
    rate, moved = history.scalar(RATE), by_block(history, MOVED)
    if not rate or not moved or not _divides(history):
        return None
    now = {site: value / rate for site, value in moved.items()}
    ratios = over_start(history, "update.too_small", now, skip=4, count=12)
    shrunk = over_start(
        history, "update.gradient", by_block(history, NORM), skip=4, count=12
    )
    ratios = {s: r / min(1.0, shrunk[s]) for s, r in ratios.items() if shrunk.get(s)}
    if not ratios:
        return None
    site = min(ratios, key=lambda name: ratios[name])
    value = median(ratios.values()) * noise_floor(0.9) / noise_floor(_beta1(history))
    return measured(value, most_in=site, lowest=ratios[site], rate=rate)


def noise_floor(beta1: float) -> float:
    """Return the size of an average over noise, beside that of the noise.

    >>> round(noise_floor(0.9), 2), round(noise_floor(0.99), 3)
    (0.23, 0.071)
    """
    return math.sqrt((1 - beta1) / (1 + beta1))


def _beta1(history: History) -> float:
    beta1 = history.scalar("optimizer.beta1")
    return 0.9 if beta1 is None else min(max(beta1, 0.0), 0.9999)


def _divides(history: History) -> bool:
    """Whether every update is a gradient over the root of its second moment."""
    kinds = history.details.get("updates")
    return kinds is None or set(kinds) == {"adaptive"}


SLACK, SPAN = 3.0, 4
"""Factor by which updates between two samples may exceed those at samples, and the
intervals over which growth is counted: a little at a time adds up."""


@measures("update.unexplained")
def unexplained(history: History) -> Measured | None:
    """Largest growth of a block's weights that the optimiser's updates do not explain.

    Over the latest samples ‖w‖ grows by at most the sum of ‖Δw‖; decay only shrinks it.
    The interval of the largest growth is left out: weights may be loaded once.
    """
    sizes = list(history.track(WEIGHT).recent)[-SPAN - 1 :]
    moved = list(history.track(MOVED).recent)[-SPAN - 1 :]
    if len(sizes) < 3 or len(moved) < 3:
        return None
    steps = (sizes[-1].step - sizes[0].step) * (len(sizes) - 2) // (len(sizes) - 1)
    found, tables = [], [dict(by_site(r)) for r in sizes]
    ends = [dict(by_site(r)) for r in moved]
    for site in sizes[-1].sites:
        norms = [table[site][0] for table in tables if site in table]
        updates = [end[site][0] for end in ends if site in end]
        if len(norms) == len(sizes) and len(updates) == len(moved) and min(norms) > 0:
            growths = sorted(after / before for before, after in pairwise(norms))[:-1]
            bound = SLACK * steps * max(updates) / norms[0]
            found.append((math.prod(growths) - 1 - bound, site, bound))
    if not found:
        return None
    value, site, bound = max(found)
    return measured(value, site, explained=bound, steps=steps)


@measures("curvature.beyond_edge")
def beyond_edge(history: History) -> Measured | None:
    """(Preconditioned) sharpness over the optimiser's threshold, after warm-up."""
    value = history.scalar(EDGE)
    return None if value is None or history.sampled < 10 else measured(value)


@measures("setting.beyond_peak")
def beyond_peak(history: History) -> Measured | None:
    """Learning rate, weight decay or ε over all that it had been, once it had stood."""
    curve = history.curve(RATE)
    known = history.memory("setting.beyond_peak", lambda: [None])
    if curve.count % BLOCK == 1:
        grown = [growth(RATE, curve), *(change(name, history) for name in AMOUNTS)]
        known[0] = next((one for one in grown if one and one.grew), None)
    moved = known[0]
    if moved is None:
        return measured(0.0)
    name = RATE if moved.setting == RATE else f"optimizer.{moved.setting}"
    now = history.curve(name).values[-1]
    told = {"setting": moved.setting, "peak": moved.peak, "peak_step": moved.peak_step}
    return measured(now / moved.peak, now=now, **told)
