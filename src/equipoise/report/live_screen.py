"""A look at a run as lines of a terminal: any width, any height, colour or not."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.records import Finding
from equipoise.report.live import LiveCurve, LiveView, levels, shrunk
from equipoise.text.numbers import short
from equipoise.text.tones import terminal

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
BROKEN, ASCII_BROKEN = "×", "!"
STYLES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "cyan": "36",
}
ASCII = str.maketrans("·…θ÷→×−–₁₂ε", "|~O/>x--12e")
LEAST_FINDINGS = 3
"""Lines that findings get before layers take the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """What a terminal can show."""

    width: int = 80
    height: int = 24
    colour: bool = True
    unicode: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the screen: text, the style of all of it."""

    text: str
    style: str = ""

    def drawn(self, screen: Screen) -> str:
        """Return the line cut to the width, with its colour where there is any."""
        text = self.text if screen.unicode else self.text.translate(ASCII)
        text = "".join(c if c.isprintable() else "?" for c in text)
        if len(text) > screen.width:
            text = text[: screen.width - 1] + ("…" if screen.unicode else "~")
        if not self.style or not screen.colour:
            return text
        return f"\x1b[{STYLES[self.style]}m{text}\x1b[0m"


def frame(view: LiveView, screen: Screen, *, keys: str = "") -> list[str]:
    """Return the lines of one screen, at most as many as there is room for."""
    head = _head(view, screen)
    room = max(0, screen.height - len(head) - (1 if keys else 0))
    found = _findings(view, screen)
    curves = [_curve(curve, screen) for curve in view.curves]
    layers = [Line("worst layers", "bold")]
    layers += [_curve(curve, screen) for curve in view.worst]
    kept = min(len(found), LEAST_FINDINGS + 1)
    body = [*curves, *(layers if len(layers) > 1 else [])][: max(0, room - kept)]
    lines = [*head, *body, *found[: room - len(body)]]
    if keys:
        blank = screen.height - 1 - len(lines)
        lines = [*lines, *[Line("")] * blank, Line(keys, "dim")]
    return [line.drawn(screen) for line in lines[: screen.height]]


def _head(view: LiveView, screen: Screen) -> list[Line]:
    step = "no step yet" if view.step is None else f"step {view.step}"
    right = f"{view.state} · {step}"
    if view.age is not None:
        right += f" · {duration(view.age)} ago"
    room = max(0, screen.width - len(right) - 2)
    title = f"{view.name[:room]:{room}}  {right}"
    return [Line(title, "bold"), Line(_tail(view.path, screen.width), "dim")] + (
        _verdict(view, screen)
    )


def _tail(path: str, width: int) -> str:
    """Return the end of a path or of a module's name: what tells them apart."""
    return path if len(path) <= width else "…" + path[1 - width :]


def _verdict(view: LiveView, screen: Screen) -> list[Line]:
    verdict = view.verdict
    text = f"{verdict.state.upper()}: {verdict.headline}"
    style = terminal(verdict.state)
    most = 2 if screen.height >= 20 else 1
    lines = [Line(part, style) for part in _wrapped(text, screen.width, most)]
    if verdict.advice and screen.height >= 16:
        parts = _wrapped(f"try: {verdict.advice}", screen.width, 2)
        lines += [Line(part) for part in parts]
    return lines


def _wrapped(text: str, width: int, most: int) -> list[str]:
    return textwrap.wrap(text, width, max_lines=most, placeholder=" …")


def _curve(curve: LiveCurve, screen: Screen) -> Line:
    room = max(16, screen.width * 2 // 5)
    site = _tail(curve.site, max(6, room - 1 - len(curve.quantity)))
    label = f"{curve.quantity[: room - 1 - len(site)]} {site}"
    start = f"{label:{room}} {short(curve.value):>10} "
    style = "" if math.isfinite(curve.value) else "red"
    bars = sparkline(
        curve.points, max(0, screen.width - len(start)), unicode=screen.unicode
    )
    return Line(start + bars, style)


def sparkline(points: Sequence[float], width: int, *, unicode: bool = True) -> str:
    """Return a curve as one line of bars; what is not finite is a cross.

    >>> sparkline([1.0, 2.0, 3.0, math.nan], 4)
    '▁▅█×'
    """
    bars = BARS if unicode else ASCII_BARS
    cross = BROKEN if unicode else ASCII_BROKEN
    if width < 1:
        return ""
    found = levels(shrunk(points, width), len(bars))
    return "".join(cross if level is None else bars[level] for level in found)


def _findings(view: LiveView, screen: Screen) -> list[Line]:
    if not view.findings:
        return [Line("no findings", "dim")]
    title = f"findings: {len(view.findings)}, the latest first"
    return [Line(title, "bold"), *(_finding(f) for f in view.findings)]


def _finding(found: Finding) -> Line:
    site = f" {found.site}" if found.site else ""
    text = f"{found.severity:5} step {found.step}{site}: {found.message}"
    return Line(text, terminal(found.severity))


def duration(seconds: float) -> str:
    """Return a time in its largest unit.

    >>> duration(3.2), duration(90), duration(7300), duration(200_000)
    ('3 s', '1 min', '2 h', '2 d')
    """
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"
