"""The parts of our pages, and the one script of report and board.

Standard library only: the board serves them before it can read a run.
"""

from functools import cache
from importlib.resources import files

SCRIPTS = (
    "numbers.js",
    "state.js",
    "source.js",
    "surface.js",
    "chart.js",
    "heatmap.js",
    "panels.js",
    "run.js",
    "compare.js",
    "live.js",
    "board.js",
    "start.js",
)


@cache
def asset(name: str) -> str:
    """Return a part of our pages: markup, style or script."""
    return (files("equipoise.report") / "page" / name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """Return the one script of report and board."""
    return '"use strict";\n' + "\n".join(asset(name) for name in SCRIPTS)
