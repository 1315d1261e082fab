"""The loss itself: above chance, not falling, risen, spikes that recovered."""

import math

from equipoise.forecast.history import History
from equipoise.forecast.rules.registry import Measured, measured, rule

START = 48
"""Steps before which the loss is not judged: warm-up."""
SMOOTH = 16


def uniform_loss(history: History) -> float | None:
    """Return ln V where the run says how many classes its output has."""
    classes = history.details.get("classes")
    return math.log(classes) if isinstance(classes, int) and classes > 1 else None


def reference_loss(history: History) -> tuple[float, str] | None:
    """Return the loss of a model that knows nothing, and what that is in words.

    ln V, where the run says how many classes its output has. A first loss far above
    that is no mean cross-entropy over V classes: then it is the reference itself.
    """
    first = history.track("loss").first
    if not first:
        return None
    began, uniform = first[0].values[0][0], uniform_loss(history)
    if uniform is not None and began <= 3 * uniform:
        return uniform, "what guessing gives"
    return began, "where it began"


@rule(
    "loss.above_chance",
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
def above_chance(history: History) -> Measured | None:
    """Smoothed loss over ln V, or over where the run began if V is not known."""
    curve = history.curve("loss")
    if curve.count < START:
        return None
    found = reference_loss(history)
    if found is None or found[0] <= 0:
        return None
    (reference, what), loss = found, curve.smoothed(SMOOTH)
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
