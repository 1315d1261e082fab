"""Rules: measures by family of trouble, their limits and words in ``rules.toml``."""

from pathlib import Path

from equipoise.judging.rules import activations, attention, gradients, run
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

FAMILIES = (attention, activations, gradients, run)

declare(Path(__file__).with_name("rules.toml"))

__all__ = ["RULES", "Measured", "Rule", "configured", "load_rules", "measured", "rule"]
