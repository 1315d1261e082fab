"""The HTML report of runs: one page with everything in it, that opens offline."""

import json
import os
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from equipoise.report.figures import Panel, Runs
from equipoise.report.pages import write_page
from equipoise.report.views import ABSENT, Report, short, view

WORDS = {"error": "Error", "warn": "Warning", "info": "Note"}
PICKS = 10


def write_report(
    runs: Runs,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    verdict: str | None = None,
) -> Path:
    """Write the report of some runs, side by side, and return where it is."""
    page = rendered(view(runs, title=title, verdict=verdict))
    return write_page(Path(path), page)


def rendered(report: Report) -> str:
    """Return the page."""
    return (
        _environment()
        .from_string(_part("page.html.j2"))
        .render(
            report=report,
            absent=ABSENT,
            words=WORDS,
            css=Markup(_part("page.css")),
            js=Markup(_part("page.js")),
            plotly=Markup(_plotly()),
            data=Markup(embedded(report.panels)),
        )
    )


def embedded(panels: list[Panel]) -> str:
    """Return the figures' data as JSON that cannot end its script element."""
    text = json.dumps([asdict(panel) for panel in panels], allow_nan=False)
    return text.replace("<", "\\u003c")


def _environment() -> Environment:
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"picks": picks, "brief": brief, "drawn": drawn}
    return environment


def picks(x: list[int]) -> list[int]:
    """Return the indices of at most ten points, the first and the last among them.

    >>> picks([5, 6, 7]), len(picks(list(range(1000))))
    ([0, 1, 2], 10)
    """
    last = len(x) - 1
    if last < PICKS:
        return list(range(len(x)))
    return [round(i * last / (PICKS - 1)) for i in range(PICKS)]


def drawn(value: float | None) -> str:
    """Return a point of a curve in numbers."""
    return "not finite" if value is None else short(value)


def brief(value: Any) -> str:
    """Return a detail of a run in one line.

    >>> brief(["h.0", "h.1", "h.2", "h.3"])
    'h.0, h.1, … h.3 (4)'
    """
    if isinstance(value, list) and len(value) > 3:
        return f"{value[0]}, {value[1]}, … {value[-1]} ({len(value)})"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


@cache
def _part(name: str) -> str:
    return (files("equipoise.report") / "page" / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
