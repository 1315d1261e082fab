"""The loss itself: above chance, not falling, risen, spikes that recovered."""

import math

from equipoise.forecast.history import Curve, History
from equipoise.forecast.rules.registry import Measured, measured, rule

START = 48
"""Steps before which the loss is not judged: warm-up."""
SMOOTH = 16


def uniform_loss(history: History) -> float | None:
    """Return ln V where the run says how many classes its output has."""
    classes = history.details.get("classes")
    return math.log(classes) if isinstance(classes, int) and classes > 1 else None


def start_loss(curve: Curve) -> float | None:
    """Return the loss of the first block of steps."""
    return curve.blocks[0][1] if curve.blocks else None


@rule(
    "loss.above_start",
    reads="loss",
    above=1.0,
    release=0.98,
    persist=16,
    recover=16,
    severity="error",
    about="loss",
    source="theory: a uniform guess has loss ln V, and training begins there",
    message="the loss is {loss:.4g}, above {reference:.4g}, {what}",
    remedies=("learning_rate", "roll_back", "gradient_clip"),
)
def above_start(history: History) -> Measured | None:
    """Smoothed loss over ln V, or over where the run began if V is not known."""
    curve = history.curve("loss")
    if curve.count < START:
        return None
    known, began = uniform_loss(history), start_loss(curve)
    reference = known or began
    if reference is None or reference <= 0:
        return None
    loss = curve.smoothed(SMOOTH)
    what = "what guessing gives" if known else "where it began"
    return measured(loss / reference, loss=loss, reference=reference, what=what)


@rule(
    "loss.risen",
    reads="loss",
    above=6.0,
    release=3.0,
    persist=24,
    recover=16,
    severity="error",
    about="loss",
    source="our calibration: python -m benchmarks.rules",
    message="the loss has risen to {loss:.4g} from {best:.4g} and has not come back",
    remedies=("roll_back", "learning_rate", "gradient_clip"),
)
def risen(history: History) -> Measured | None:
    """How far the smoothed loss stands above its best block, in units of its noise."""
    curve = history.curve("loss")
    if curve.count < START or len(curve.blocks) < 4:
        return None
    best = min(mean for _, mean in curve.blocks)
    loss = curve.smoothed(SMOOTH)
    noise = max(curve.spread() / math.sqrt(SMOOTH), 0.01 * abs(best))
    return measured((loss - best) / noise, loss=loss, best=best)
