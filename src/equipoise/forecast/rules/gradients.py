"""Gradients over depth: vanished, exploding, spikes."""

from equipoise.forecast.history import History
from equipoise.forecast.rules.registry import Measured, measured, rule


def over_depth(history: History) -> list[tuple[str, float]]:
    """Return the gradient norm of each block that was read, in order of depth.

    A frozen block has no reading, and one whose few trained parameters are an adapter's
    is compared with others like it; so neither counts as vanished.
    """
    reading = history.last("gradient.norm")
    if reading is None:
        return []
    norms = dict(zip(reading.sites, reading.values, strict=True))
    return [(block, norms[block][0]) for block in history.blocks if block in norms]


@rule(
    "gradient.vanished",
    reads="gradient.norm",
    below=0.02,
    release=0.05,
    persist=3,
    severe=1e-4,
    scope="layer",
    source="our calibration: python -m benchmarks.rules",
    message="{site} receives {value:.2g} of the gradient of {largest}: the layers "
    "before it hardly learn",
    remedies=("deepnorm_init", "residual_scale", "learning_rate"),
)
def vanished(history: History) -> Measured | None:
    """The smallest gradient norm over depth, over that of the largest block."""
    norms = over_depth(history)
    if len(norms) < 2:
        return None
    least, most = min(norms, key=lambda p: p[1]), max(norms, key=lambda p: p[1])
    if not most[1] > 0:
        return None
    return measured(
        least[1] / most[1],
        least[0],
        norm=least[1],
        largest=most[0],
        largest_norm=most[1],
    )
