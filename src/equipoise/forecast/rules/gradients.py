"""Gradients: vanished or exploding over depth, of queries and keys, spikes in time."""

import math
from statistics import median

from equipoise.forecast.history import History, by_site
from equipoise.forecast.rules.registry import Measured, measured, rule

NORM, TOTAL, QK = "gradient.norm", "gradient.norm.total", "gradient.qk"
STARTS = 6
"""Samples that say with what share of the gradient Q and K began."""
CALIBRATED = "our calibration: python -m benchmarks.rules"


def over_depth(history: History) -> list[tuple[str, float]]:
    """Return the gradient norm of each block that was read, in order of depth.

    A frozen block has no reading. Blocks of which only an adapter is trained are all
    alike. So neither counts as vanished.
    """
    reading = history.last(NORM)
    if reading is None:
        return []
    norms = dict(by_site(reading))
    return [(block, norms[block][0]) for block in history.blocks if block in norms]


@rule(
    "gradient.vanished",
    reads=NORM,
    below=0.02,
    release=0.05,
    persist=3,
    severe=1e-4,
    scope="layer",
    source=CALIBRATED,
    message="{site} receives {value:.2g} of the gradient of {largest}: early layers "
    "hardly learn",
    remedies=("deepnorm_init", "residual_scale", "learning_rate"),
)
def vanished(history: History) -> Measured | None:
    """Smallest norm in the first half of the blocks over the largest in the second."""
    norms = over_depth(history)
    if len(norms) < 2:
        return None
    middle = (len(norms) + 1) // 2
    least = min(norms[:middle], key=lambda pair: pair[1])
    most = max(norms[middle:], key=lambda pair: pair[1])
    if not most[1] > 0:
        return None
    return measured(
        least[1] / most[1],
        least[0],
        norm=least[1],
        largest=most[0],
        largest_norm=most[1],
    )


@rule(
    "gradient.exploding",
    reads=NORM,
    above=60.0,
    release=30.0,
    persist=3,
    severe=1e4,
    scope="layer",
    source=CALIBRATED,
    message="gradients explode over depth: {site} receives {value:.3g} times the "
    "gradient of {least}",
    remedies=("gradient_clip", "residual_scale", "learning_rate"),
)
def exploding(history: History) -> Measured | None:
    """Largest norm in the first half of the blocks over the smallest in the second."""
    norms = over_depth(history)
    if len(norms) < 2:
        return None
    middle = (len(norms) + 1) // 2
    most = max(norms[:middle], key=lambda pair: pair[1])
    least = min(norms[middle:], key=lambda pair: pair[1])
    if not least[1] > 0:
        return None
    return measured(most[1] / least[1], most[0], least=least[0], norm=most[1])


@rule(
    "gradient.spike",
    reads=TOTAL,
    above=4.0,
    release=2.5,
    persist=3,
    severe=10.0,
    scope="batch",
    source="Megatron takes 10 times the largest of its first steps; lower, because "
    "three steps in a row are asked for; " + CALIBRATED,
    message="the gradient norm is {norm:.3g}, {value:.3g} times its median of the last "
    "64 readings",
    remedies=("gradient_clip", "skip_step", "spike_handling"),
)
def spike(history: History) -> Measured | None:
    """Norm of the whole gradient over the median of those kept before it."""
    curve = history.curve(TOTAL)
    if curve.count < 16 or not curve.usual > 0:
        return None
    norm = curve.values[-1]
    return measured(norm / curve.usual, norm=norm, usual=curve.usual)


@rule(
    "gradient.qk_starved",
    reads=(QK, NORM),
    below=0.05,
    release=0.1,
    persist=3,
    scope="layer",
    source="theory: the gradient of W_Q and W_K carries the factor θ (Emadi 2026); "
    + CALIBRATED,
    message="queries and keys receive {value:.2g} of the share of the gradient that "
    "they began with, the least in {site}",
    remedies=("qk_norm", "learning_rate", "temperature", "deepnorm_init"),
)
def qk_starved(history: History) -> Measured | None:
    """Median over layers of Q's and K's share of the gradient, over its start.

    A share, because all gradients shrink as a loss goes to zero.
    """
    now = history.last(QK)
    total = _total(history)
    if now is None or not total > 0:
        return None
    seen = history.memory("gradient.qk_starved", dict)
    shares = {site: row[0] / total for site, row in by_site(now)}
    for site, share in shares.items():
        kept = seen.setdefault(site, [])
        if len(kept) < STARTS:
            kept.append(share)
    began = {s: median(seen[s]) for s in shares if len(seen[s]) == STARTS}
    ratios = {s: shares[s] / began[s] for s in began if began[s] > 0}
    if not ratios:
        return None
    lowest = min(ratios, key=lambda site: ratios[site])
    return measured(median(ratios.values()), lowest, lowest=ratios[lowest])


def _total(history: History) -> float:
    """Return the norm over all that was read of the gradient at the last sample."""
    reading = history.last(NORM)
    rows = reading.values if reading is not None else ()
    return math.sqrt(sum(row[0] ** 2 for row in rows))
