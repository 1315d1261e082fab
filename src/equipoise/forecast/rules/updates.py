"""Updates: too large or too small for their weights, or lost in rounding."""

from statistics import median

from equipoise.forecast.history import History, by_site
from equipoise.forecast.rules.registry import Measured, measured, rule

CALIBRATED = "our calibration: python -m benchmarks.rules"
RATIO, MOVED, RATE = "update.ratio", "update.norm", "learning_rate"


def by_block(history: History, quantity: str) -> dict[str, float]:
    """Return the latest value of each block; of every site where blocks are unknown."""
    reading = history.last(quantity)
    if reading is None:
        return {}
    rows = {site: row[0] for site, row in by_site(reading)}
    blocks = {block: rows[block] for block in history.blocks if block in rows}
    return blocks or rows


@rule(
    "update.too_large",
    reads=RATIO,
    above=0.02,
    release=0.015,
    persist=3,
    scope="layer",
    source="about 1e-3 is usual at the peak rate; " + CALIBRATED,
    message="updates are too large: one step moves {value:.2%} of the median block's "
    "weights, {largest:.2%} of {site}",
    remedies=("learning_rate", "update_clip", "group_learning_rates", "beta2"),
)
def too_large(history: History) -> Measured | None:
    """Median over blocks of ‖Δw‖/‖w‖."""
    ratios = by_block(history, RATIO)
    if not ratios:
        return None
    site = max(ratios, key=lambda name: ratios[name])
    return measured(median(ratios.values()), site, largest=ratios[site])


@rule(
    "update.too_small",
    reads=(MOVED, RATE),
    below=0.1,
    release=0.2,
    persist=3,
    scope="layer",
    source="theory: Adam moves every weight by about its rate unless ε or a spoilt "
    "second moment rules; " + CALIBRATED,
    message="updates have shrunk to {value:.2g} of what this learning rate gave "
    "before, the most in {site}: Adam's ε or a second moment left by a spike rules",
    remedies=("optimizer_reset", "beta2", "gradient_clip"),
)
def too_small(history: History) -> Measured | None:
    """Median over blocks of ‖Δw‖/rate over its median in the first samples."""
    rate = history.scalar(RATE)
    moved = by_block(history, MOVED)
    if not rate or not moved:
        return None
    seen = history.memory("update.too_small", dict)
    now = {site: value / rate for site, value in moved.items()}
    for site, value in now.items():
        kept = seen.setdefault(site, [])
        if len(kept) < 12:
            kept.append(value)
    ratios = {
        site: value / median(seen[site][4:])
        for site, value in now.items()
        if len(seen[site]) >= 12 and median(seen[site][4:]) > 0
    }
    if not ratios:
        return None
    site = min(ratios, key=lambda name: ratios[name])
    return measured(median(ratios.values()), site, lowest=ratios[site], rate=rate)


@rule(
    "update.lost",
    reads=("update.unchanged", RATIO),
    above=0.3,
    release=0.15,
    persist=3,
    scope="layer",
    source="theory: an update below half a unit in the last place changes nothing, and "
    "in float32 no update is that small; " + CALIBRATED,
    message="updates are lost: {value:.0%} of the median block's weights, and "
    "{largest:.0%} of {site}, are what they were at the last sample",
    remedies=("keep_fp32", "learning_rate"),
)
def lost(history: History) -> Measured | None:
    """Median over blocks of the share of weights that did not change in an interval."""
    ratios, same = by_block(history, RATIO), by_block(history, "update.unchanged")
    same = {s: v for s, v in same.items() if ratios.get(s, 0.0) > 1e-6}
    if not same:
        return None
    site = max(same, key=lambda name: same[name])
    return measured(median(same.values()), site, largest=same[site])
