"""The parts of our pages, and the one script of report and board.

Standard library only, as ``text.tones`` is: the board serves them before it can read
a run.
"""

import json
from functools import cache
from importlib.resources import files

from equipoise.text import tones

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
    "runs.js",
    "board.js",
    "start.js",
)


@cache
def asset(name: str) -> str:
    """Return a part of our pages: markup, style or script."""
    return (files("equipoise.report") / "page" / name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """Return the one script of report and board; it begins with words and tones."""
    looks = {"states": tones.STATES, "severities": tones.SEVERITIES}
    data = {name: {k: [*look] for k, look in of.items()} for name, of in looks.items()}
    parts = [asset(name) for name in SCRIPTS]
    return "\n".join(['"use strict";', f"const LOOKS = {json.dumps(data)};", *parts])


@cache
def style() -> str:
    """Return the style of our pages, the colour of each tone in front."""
    return tones.css() + asset("style.css")
