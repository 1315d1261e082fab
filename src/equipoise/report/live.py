"""What a run looks like right now: the view-model of the terminal and the notebook.

A ``Follower`` reads what is new since it last looked and keeps the judge of the run, so
that looking again costs what was written meanwhile, not the length of the run.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.judging.card import Card
from equipoise.judging.judge import Judge
from equipoise.judging.verdict import Verdict
from equipoise.records import Finding, Reading
from equipoise.report.grids import blocks_of, layer_of
from equipoise.store import Run, Summary
from equipoise.store.lock import State
from equipoise.text.verdict_text import worded

POINTS = 120
"""Entries of a sparkline, at most: more than a terminal is wide."""
WHOLE = ("loss", "gradient.norm.total", "learning_rate")
"""Curves of the model as a whole."""
Extreme = Literal["lowest", "highest"]
BY_LAYER: dict[str, Extreme] = {
    "attention.max_logit": "highest",
    "attention.max_logit.sampled": "highest",
    "attention.theta.p5": "lowest",
    "attention.entropy": "lowest",
    "gradient.norm": "lowest",
    "update.ratio": "highest",
    "residual.token_cosine": "highest",
    "sensitivity.S": "highest",
    "router.entropy": "lowest",
}
"""Quantity → which end of it is the worse one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCurve:
    """A quantity over training at one site, and its last value."""

    quantity: str
    site: str = ""
    value: float
    points: tuple[float, ...]
    """The worse end of each stretch of steps; NaN where it was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """One look at a run."""

    name: str
    path: str
    state: State
    step: int | None
    """The last one recorded."""
    age: float | None
    """Seconds since it was recorded."""
    verdict: Verdict
    card: Card
    curves: tuple[LiveCurve, ...]
    worst: tuple[LiveCurve, ...]
    """Of each quantity by layer, the layer where it stands worst."""
    findings: tuple[Finding, ...]
    """The latest first."""


class Follower:
    """Looks at a run again and again."""

    def __init__(self, run: Run, *, now: Callable[[], float] = time.time) -> None:
        self.run = run
        self._judge = Judge(run.info.details)
        self._cursor, self._now = 0, now

    def look(self) -> LiveView:
        """Return how the run stands."""
        self._read()
        run, last = self.run, self.run.last_time
        steps = run.steps
        known = set(run.quantities)
        card, self._judge.unseen = run.card, run.card.unseen
        verdict, found = worded(self._judge.verdict), run.findings
        known_ones = {f.key for f in found}
        found += [f for f in verdict.findings if f.key not in known_ones]
        return LiveView(
            name=run.info.name,
            path=str(run.path),
            state=run.state,
            step=int(steps[-1]) if len(steps) else None,
            age=None if last is None else max(0.0, self._now() - last),
            verdict=verdict,
            card=card,
            curves=tuple(self._whole(q) for q in WHOLE if q in known),
            worst=tuple(
                self._worst(quantity, end)
                for quantity, end in BY_LAYER.items()
                if quantity in known
            ),
            findings=tuple(sorted(found, key=lambda f: -f.step)),
        )

    def _read(self) -> None:
        while True:
            news, cursor = self.run.since(self._cursor)
            if cursor == self._cursor:
                return
            self._cursor = cursor
            self._judge.follow(news)

    def _whole(self, quantity: str) -> LiveCurve:
        return self._curve(quantity, "", _last(self.run, quantity), "highest")

    def _worst(self, quantity: str, end: Extreme) -> LiveCurve:
        reading = _last(self.run, quantity)
        rows = dict(zip(reading.sites, reading.values, strict=True))
        blocks = blocks_of(self.run)
        layers = [site for site in rows if layer_of(site, blocks) is not None]
        values = {site: worse(rows[site], end) for site in layers or rows}
        most = worse([*values.values()], end)
        # Not by ==: a NaN is no other NaN.
        site = next((s for s, v in values.items() if v is most or v == most), "")
        return self._curve(quantity, site, reading, end)

    def _curve(
        self, quantity: str, site: str, reading: Reading, end: Extreme
    ) -> LiveCurve:
        row = reading.values[reading.sites.index(site)] if reading.sites else ()
        found = self.run.summary(quantity, site, points=POINTS)[site]
        return LiveCurve(
            quantity=quantity,
            site=site,
            value=worse(row, end),
            points=_points(found, end),
        )


def _last(run: Run, quantity: str) -> Reading:
    return run.ends(quantity)[1]


def worse(values: Sequence[float], end: Extreme) -> float:
    """Return the worse end of some values; one that is not finite is worst of all.

    >>> worse([1.0, 3.0], "lowest"), worse([1.0, math.inf, 9.0], "highest")
    (1.0, inf)
    """
    broken = [value for value in values if not math.isfinite(value)]
    if broken or not values:
        return broken[0] if broken else math.nan
    return min(values) if end == "lowest" else max(values)


def _points(found: Summary, end: Extreme) -> tuple[float, ...]:
    edge = found.low if end == "lowest" else found.high
    return tuple(np.where(found.broken > 0, np.nan, edge).tolist())


def shrunk(points: Sequence[float], width: int) -> list[float]:
    """Return at most ``width`` points, each the one farthest from the middle.

    A spike survives however narrow the terminal is; so does a NaN.

    >>> shrunk([1, 1, 9, 1, 1, 1], 3)
    [1, 9, 1]
    """
    if len(points) <= width:
        return list(points)
    finite = [p for p in points if math.isfinite(p)]
    middle = sorted(finite)[len(finite) // 2] if finite else 0.0
    edges = [len(points) * i // width for i in range(width + 1)]
    parts = (points[a:b] for a, b in zip(edges, edges[1:], strict=False))
    return [max(part, key=lambda p: _distance(p, middle)) for part in parts]


def _distance(point: float, middle: float) -> float:
    return abs(point - middle) if math.isfinite(point) else math.inf


def levels(points: Sequence[float], count: int) -> list[int | None]:
    """Return the height of each point among ``count``; None where it is not finite.

    On a logarithmic scale where the values are positive and span a hundredfold.

    >>> levels([0.0, 1.0, math.nan, 2.0], 8)
    [0, 4, None, 7]
    """
    finite = [p for p in points if math.isfinite(p)]
    if not finite:
        return [None] * len(points)
    low, high = min(finite), max(finite)
    scale: Callable[[float], float] = float
    if low > 0 and high / low > 100:
        scale = math.log
    start, room = scale(low), (scale(high) - scale(low)) or math.inf
    return [
        min(count - 1, int(count * (scale(p) - start) / room))
        if math.isfinite(p)
        else None
        for p in points
    ]
