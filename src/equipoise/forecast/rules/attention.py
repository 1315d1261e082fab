"""Attention: saturated, collapsed to uniform, logits growing, entropy, sinks, heads."""

from equipoise.forecast.history import History, by_site
from equipoise.forecast.rules.registry import Measured, measured, rule


@rule(
    "attention.saturated",
    reads="attention.theta.p50",
    above=0.5,
    release=0.35,
    persist=3,
    scope="head",
    source="our calibration: long-trained healthy models have at most 23 % such heads",
    message="{count} of {heads} heads are saturated (median θ below 0.5), the most in "
    "{site}: their queries and keys hardly learn any more",
    remedies=("qk_norm", "qk_clip", "learning_rate", "temperature"),
)
def saturated(history: History) -> Measured | None:
    """Share of heads whose median row has θ < 0.5."""
    reading = history.last("attention.theta.p50")
    if reading is None:
        return None
    counts = {
        site: sum(theta < 0.5 for theta in heads) for site, heads in by_site(reading)
    }
    heads = sum(len(row) for row in reading.values)
    if not heads:
        return None
    worst = max(counts, key=lambda site: counts[site])
    total = sum(counts.values())
    return measured(total / heads, worst, count=total, heads=heads)
