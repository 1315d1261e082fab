"""Rules: one file per family of trouble; importing this registers all of them."""

from equipoise.forecast.rules import attention, gradients, loss
from equipoise.forecast.rules.registry import (
    RULES,
    Measured,
    Rule,
    configured,
    load_rules,
    measured,
    rule,
)

FAMILIES = (loss, attention, gradients)

__all__ = ["RULES", "Measured", "Rule", "configured", "load_rules", "measured", "rule"]
