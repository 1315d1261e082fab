"""What a script logs itself, as the run records it beside our readings."""

import json
from collections.abc import Mapping
from typing import Any

OURS = frozenset({"loss", "learning_rate"})
"""Readings that are recorded as the loop is seen; a script's own stand beside them."""


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers under names that are not taken.

    >>> numbers({"loss": 2, "train/accuracy": 0.5, "note": "warm"})
    {'logged.loss': 2.0, 'train/accuracy': 0.5}
    """
    return {
        f"logged.{name}" if name in OURS else name: float(value)
        for name, value in values.items()
        if hasattr(value, "__float__")
    }


def configuration(values: Any) -> dict[str, Any]:
    """Return a script's configuration as JSON values."""
    fields = dict(values) if isinstance(values, Mapping) else vars(values)
    found: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return found
