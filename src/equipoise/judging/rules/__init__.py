"""Rules: measures by family of trouble, their limits in the TOML files beside them."""

from pathlib import Path

from equipoise.judging.rules import (
    activations,
    attention,
    gradients,
    run,
    starts,
    weights,
)
from equipoise.judging.rules.registry import (
    RULES,
    Measured,
    Rule,
    configured,
    declare,
    load_rules,
    measured,
    rule,
)

FAMILIES = (attention, activations, gradients, run, weights, starts)

declare(Path(__file__).parent)

__all__ = ["RULES", "Measured", "Rule", "configured", "load_rules", "measured", "rule"]
