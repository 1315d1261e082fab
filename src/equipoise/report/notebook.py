"""A run in a notebook: one block of HTML, redrawn in place while the run is written.

No widget and no script: the block is an IPython display that a thread updates. Where
there is no IPython, the same is printed once as text.
"""

import html
import math
import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from equipoise.errors import EquipoiseError, InputError
from equipoise.report.live import Follower, LiveCurve, LiveView, levels, shrunk
from equipoise.report.live_screen import Screen, duration, frame
from equipoise.store import Run, open_run
from equipoise.text.numbers import short
from equipoise.text.tones import STATES, TONES

SHOWN = 8
"""Findings in the block; the run file has them all."""
WIDTH, HEIGHT = 160, 24
BROKEN = TONES["error"].light


class HasPath(Protocol):
    """What ``watch`` returns, and anything else that knows its run file."""

    path: Path


Followed = Run | HasPath | str | os.PathLike[str]


def show(run: Followed, *, refresh: float = 2.0) -> "Show":
    """Show a run below this cell, and keep it current until the run has ended.

    Args:
        run: A watch handle, a run, or the path of one.
        refresh: Seconds between two looks.

    Raises:
        InputError: If this is no run, or ``refresh`` is not positive.
        RunFileError: If there is no such file.
    """
    if not refresh > 0:
        raise InputError(f"refresh={refresh!r}: seconds between two looks, such as 2")
    return Show(Follower(_opened(run)), refresh)


def _opened(run: object) -> Run:
    if isinstance(run, Run):
        return run
    path = run if isinstance(run, str | os.PathLike) else getattr(run, "path", None)
    if path is None:
        raise InputError(
            f"show was given a {type(run).__name__}: give it what watch returned, a "
            "run, or the path of one"
        )
    return open_run(path)


class Show:
    """A block of a notebook that follows a run; ``.stop()`` leaves it as it stands."""

    def __init__(self, follower: Follower, refresh: float) -> None:
        self._follower, self._refresh = follower, refresh
        self._stopped = threading.Event()
        self._drawn = ""
        self._block = _display(self._look())
        self._thread = threading.Thread(target=self._follow, daemon=True)
        if self._block is not None:
            self._thread.start()

    def stop(self) -> None:
        """Draw the run a last time, and follow it no more."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> LiveView:
        self._view = self._follower.look()
        return self._view

    def _follow(self) -> None:
        while self._view.state == "live":
            over = self._stopped.wait(self._refresh)
            try:
                self._redraw()
            except EquipoiseError as error:  # the file is gone: say so in its place
                self._block.update(_markup(f"<p>{html.escape(str(error))}</p>"))
                return
            if over:
                return

    def _redraw(self) -> None:
        drawn = block(self._look())
        if drawn != self._drawn:
            self._drawn = drawn
            self._block.update(_markup(drawn))

    def __repr__(self) -> str:
        return f"Show({self._follower.run!r})"


def _display(view: LiveView) -> Any:
    """Show a view; return what can be updated, or None where it was printed."""
    if "IPython" not in sys.modules or import_module("IPython").get_ipython() is None:
        print("\n".join(frame(view, Screen(colour=False))))
        return None
    display = import_module("IPython.display").display
    return display(_markup(block(view)), display_id=True)


def _markup(text: str) -> Any:
    return import_module("IPython.display").HTML(text)


def block(view: LiveView) -> str:
    """Return a view as HTML that stands alone; everything from the run is escaped."""
    verdict = view.verdict
    step = "no step yet" if view.step is None else f"step {view.step}"
    age = "" if view.age is None else f", {duration(view.age)} ago"
    e = html.escape
    colour = TONES[STATES[verdict.state].tone].light
    advice = f"<br>Try: {e(verdict.advice)}" if verdict.advice else ""
    return (
        f"<div><b>{e(view.name)}</b> · {view.state} · {step}{age}"
        f'<br><b style="color:{colour}">{verdict.state}</b>: '
        f"{e(verdict.headline)}{advice}"
        f"{_card(view)}<table>{''.join(map(_row, (*view.curves, *view.worst)))}</table>"
        f"{_findings(view)}<small>{e(view.path)}</small></div>"
    )


def _card(view: LiveView) -> str:
    """Return the card: three lines, and all of it behind them."""
    if not view.card:
        return ""
    opening = "<br>".join(map(html.escape, view.card.opening)) or "What the loop does"
    return (
        f"<details><summary>{opening}</summary>"
        f"<pre>{html.escape(str(view.card))}</pre></details>"
    )


def _row(curve: LiveCurve) -> str:
    cells = (curve.quantity, curve.site, short(curve.value))
    text = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    return f"<tr>{text}<td>{svg(curve)}</td></tr>"


def svg(curve: LiveCurve) -> str:
    """Return a curve as a small drawing; what is not finite is a red mark."""
    heights = levels(shrunk(curve.points, WIDTH // 2), HEIGHT)
    across = (WIDTH - 1) / max(1, len(heights) - 1)
    marks, line = [], []
    for i, height in enumerate(heights):
        x = i * across
        if height is None:
            marks.append(f'<path d="M{x:.1f} 0V{HEIGHT}" stroke="{BROKEN}"/>')
        else:
            line.append(f"{x:.1f},{HEIGHT - 1 - height}")
    drawn = f'<polyline points="{" ".join(line)}" fill="none" stroke="currentColor"/>'
    last = "not finite" if not math.isfinite(curve.value) else short(curve.value)
    label = html.escape(f"{curve.quantity} over training, now {last}", quote=True)
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{label}">'
        f"{drawn}{''.join(marks)}</svg>"
    )


def _findings(view: LiveView) -> str:
    items = "".join(
        f"<li>{f.severity}, step {f.step} {html.escape(f.site)}: "
        f"{html.escape(f.message)}</li>"
        for f in view.findings[:SHOWN]
    )
    left = len(view.findings) - SHOWN
    more = f"<li>{left} more in the run file</li>" if left > 0 else ""
    return f"<ul>{items}{more}</ul>" if items else "<p>no findings</p>"
