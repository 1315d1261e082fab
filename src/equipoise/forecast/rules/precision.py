"""Low precision: rounding error of attention above target."""

from equipoise.forecast.history import History, by_site, finite
from equipoise.forecast.rules.registry import Measured, measured, rule

ERROR = "precision.rms_error.bf16"


@rule(
    "precision.error",
    reads=ERROR,
    above=0.05,
    release=0.03,
    persist=3,
    preset="deep",
    scope="head",
    source="our precision study: a head above 5 % in bf16 is not computed, it is "
    "guessed (docs/quantities/rms-error.md)",
    message="in bf16 attention of {site}, head {head}, would err by {value:.1%}",
    remedies=("keep_fp32", "qk_clip", "qk_norm"),
)
def error(history: History) -> Measured | None:
    """Largest predicted relative error of a head in bf16."""
    reading = history.last(ERROR)
    if reading is None:
        return None
    pairs = [(v, s, h) for s, row in by_site(reading) for h, v in enumerate(row)]
    if not finite([v for v, _, _ in pairs]):
        return None
    value, site, head = max(p for p in pairs if p[0] == p[0])
    return measured(value, site, head=head)
