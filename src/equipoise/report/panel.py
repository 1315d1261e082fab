"""A figure as pure data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from equipoise.report.curves import Curve
from equipoise.store import Run

Runs = Mapping[str, Run]
"""What each run is called in the report → the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What is drawn, how to read it, and what could not be drawn."""

    key: str
    title: str
    reading: str
    """One or two sentences: how to read it."""
    x: str
    y: str
    log: bool = False
    curves: list[Curve] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    """One sentence per thing a run does not have. Absent is not zero."""
    breaks: dict[str, int] = field(default_factory=dict)
    """Per run, the first step at which a value was NaN or Inf."""
