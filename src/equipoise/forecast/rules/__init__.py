"""Rules: one file per family of trouble; importing this registers all of them."""

from equipoise.forecast.rules import (
    attention,
    coverage,
    curvature,
    failure,
    gradients,
    loss,
    norms,
    precision,
    residual,
    router,
    updates,
)
from equipoise.forecast.rules.registry import (
    RULES,
    Measured,
    Rule,
    configured,
    load_rules,
    measured,
    rule,
)

FAMILIES = (
    loss,
    attention,
    gradients,
    residual,
    updates,
    norms,
    curvature,
    precision,
    router,
    failure,
    coverage,
)

__all__ = ["RULES", "Measured", "Rule", "configured", "load_rules", "measured", "rule"]
