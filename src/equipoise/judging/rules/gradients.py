"""Gradients over depth and time, the updates they make, and the learning rate."""

import math
from collections.abc import Callable
from statistics import median

from equipoise.judging.history import History, by_site
from equipoise.judging.rules.registry import Measured, measured, measures
from equipoise.records import Scalar

NORM, TOTAL, QK = "gradient.norm", "gradient.norm.total", "gradient.qk"
RATIO, MOVED, RATE = "update.ratio", "update.norm", "learning_rate"
EDGE = "curvature.edge_ratio"
ORTHOGONALISED = ("Muon", "Dion")
"""Classes that orthogonalise the step of a matrix, as older runs name them.
"""
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
) -> tuple[Named, Named] | None:
    """Return one block of the first half and one of the second, as min or max picks."""
    norms = by_depth(history)
    if len(norms) < 2:
        return None
    middle = (len(norms) + 1) // 2
    first = early(norms[:middle], key=lambda pair: pair[1])
    second = late(norms[middle:], key=lambda pair: pair[1])
    return (first, second) if second[1] > 0 else None


@measures("gradient.vanished")
def vanished(history: History) -> Measured | None:
    """Smallest norm in the first half of the blocks over the largest in the second."""
    if pair := early_and_late(history, min, max):
        (site, norm), (largest, most) = pair
        more: dict[str, Scalar] = {"largest": largest, "largest_norm": most}
        return measured(norm / most, site, norm=norm, **more)
    return None


@measures("gradient.exploding")
def exploding(history: History) -> Measured | None:
    """Largest norm in the first half of the blocks over the smallest in the second."""
    found = early_and_late(history, max, min)
    if found is None:
        return None
    (site, norm), (least, smallest) = found
    return measured(norm / smallest, site, least=least, norm=norm)


@measures("gradient.spike")
def spike(history: History) -> Measured | None:
    """Norm of the whole gradient over the median of those kept before it."""
    curve = history.curve(TOTAL)
    if curve.count < 16 or not curve.usual > 0:
        return None
    norm = curve.values[-1]
    return measured(norm / curve.usual, norm=norm, usual=curve.usual)


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
    """Median over blocks of ‖Δw‖/‖w‖, of optimisers whose step follows the gradient.

    An orthogonalised step has a size of its own, the rate times a norm of the shape,
    whatever the gradient: it is large beside small weights by design.
    """
    kinds = history.details.get("updates", ())
    named = history.details.get("optimizer") in ORTHOGONALISED
    if "orthogonalised" in kinds or (named and not kinds):
        return None
    return of_median_block(by_block(history, RATIO))


@measures("update.lost")
def lost(history: History) -> Measured | None:
    """Median over blocks of the share of weights that did not change in an interval."""
    ratios, same = by_block(history, RATIO), by_block(history, "update.unchanged")
    return of_median_block({s: v for s, v in same.items() if ratios.get(s, 0.0) > 1e-6})


@measures("update.too_small")
def too_small(history: History) -> Measured | None:
    """Median over blocks of ‖Δw‖/rate over its median in the first samples."""
    rate, moved = history.scalar(RATE), by_block(history, MOVED)
    if not rate or not moved:
        return None
    now = {site: value / rate for site, value in moved.items()}
    ratios = over_start(history, "update.too_small", now, skip=4, count=12)
    if not ratios:
        return None
    site = min(ratios, key=lambda name: ratios[name])
    value = median(ratios.values())
    return measured(value, most_in=site, lowest=ratios[site], rate=rate)


@measures("curvature.beyond_edge")
def beyond_edge(history: History) -> Measured | None:
    """(Preconditioned) sharpness over the optimiser's threshold, after warm-up."""
    value = history.scalar(EDGE)
    return None if value is None or history.sampled < 10 else measured(value)
