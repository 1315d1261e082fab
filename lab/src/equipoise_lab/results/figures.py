"""Small line charts as SVG text: the same numbers give the same file, byte for byte."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 30, 42
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Told apart by colour-blind readers (Okabe and Ito)."""
DASHES = ("", "6 3", "2 3")


@dataclass(frozen=True, kw_only=True)
class FigureLine:
    """One line; a point that is not finite is a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    """Empty, or the lower edge of a band around the line."""
    high: Sequence[float] = ()
    points: bool = False
    """Marks without a line between them."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart with its axes."""

    name: str
    title: str
    x: str
    y: str
    lines: Sequence[FigureLine]
    log_x: bool = False
    log_y: bool = False


def chart(
    name: str,
    title: str,
    lines: Sequence[FigureLine],
    *,
    x: str,
    y: str = "",
    log: str = "",
) -> Figure:
    """Return a figure; ``log`` names its logarithmic axes: ``x``, ``y`` or ``xy``."""
    log_x, log_y = "x" in log, "y" in log
    return Figure(
        name=name, title=title, x=x, y=y, lines=lines, log_x=log_x, log_y=log_y
    )


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Numbers to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: Sequence[float] = field(default=())

    def __call__(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        share = (at - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def axis(values: Sequence[float], *, start: float, end: float, log: bool) -> Axis:
    """Return an axis that holds the finite values, with ticks at round numbers."""
    kept = [math.log10(v) if log else v for v in values if usable(v, log)]
    low, high = (min(kept), max(kept)) if kept else (0.0, 1.0)
    pad = (high - low) * 0.04 or abs(low) * 0.05 or 0.5
    low, high = low - pad, high + pad
    step = 1.0 if log and high - low > 2 else _round_step((high - low) / 4)
    step = step * max(1, round((high - low) / (6 * step))) if log else step
    first = math.ceil(low / step)
    marks = [i * step for i in range(first, math.floor(high / step) + 1)]
    ticks = [10**m if log else m for m in marks]
    return Axis(low=low, high=high, start=start, end=end, log=log, ticks=ticks)


def usable(value: float, log: bool) -> bool:
    """Say whether a value can be drawn."""
    return math.isfinite(value) and (value > 0 or not log)


def _round_step(rough: float) -> float:
    scale = float(10 ** math.floor(math.log10(rough)))
    return next(m * scale for m in (1, 2, 5, 10) if m * scale >= rough * 0.999)


def svg(figure: Figure) -> str:
    """Return the figure as one SVG document on white."""
    every_y = [v for one in figure.lines for v in (*one.y, *one.low, *one.high)]
    across = axis(
        [v for one in figure.lines for v in one.x],
        start=LEFT,
        end=WIDTH - RIGHT,
        log=figure.log_x,
    )
    up = axis(every_y, start=HEIGHT - BOTTOM, end=TOP, log=figure.log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 16, figure.title, weight="bold"),
        *_grid(across, up),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, figure.x, anchor="middle"),
        _text(6, TOP - 4, figure.y),
    ]
    for place, one in enumerate(figure.lines):
        parts += _drawn(one, place, across, up)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(across: Axis, up: Axis) -> list[str]:
    found = []
    for tick in up.ticks:
        y = up(tick)
        found.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd" fill="none"/>'
        )
        found.append(_text(LEFT - 6, y + 4, _number(tick), anchor="end"))
    for tick in across.ticks:
        x = across(tick)
        found.append(_text(x, HEIGHT - BOTTOM + 16, _number(tick), anchor="middle"))
    box = f"M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"
    return [*found, f'<path d="{box}" stroke="#666" fill="none"/>']


def _drawn(one: FigureLine, place: int, across: Axis, up: Axis) -> list[str]:
    colour = COLOURS[place % len(COLOURS)]
    dash = DASHES[place // len(COLOURS) % len(DASHES)]
    style = f'stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"'
    y = TOP + 12 + 16 * place
    x = WIDTH - RIGHT + 10
    found = []
    if one.low and one.high:
        band = [*zip(one.x, one.high, strict=True)]
        band += reversed([*zip(one.x, one.low, strict=True)])
        path = _path(band, across, up)
        found.append(f'<path d="{path}" fill="{colour}" fill-opacity="0.12"/>')
    points = list(zip(one.x, one.y, strict=True))
    if one.points:
        found += _marks(points, across, up, colour=colour)
        found += [f'<circle cx="{x + 9}" cy="{y}" r="3" fill="{colour}"/>']
    else:
        found += [f'<path d="{_path(points, across, up)}" {style} fill="none"/>']
        found += [f'<path d="M{x} {y}h18" {style} fill="none"/>']
    return [
        *found,
        _text(x + 23, y + 4, one.name),
    ]


def _marks(
    points: list[tuple[float, float]], across: Axis, up: Axis, *, colour: str
) -> list[str]:
    return [
        f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="1.8" fill="{colour}" '
        'fill-opacity="0.6"/>'
        for x, y in points
        if usable(x, across.log) and usable(y, up.log)
    ]


def _path(points: list[tuple[float, float]], across: Axis, up: Axis) -> str:
    """Return the path; after a gap the pen is lifted."""
    found, down = [], False
    for x, y in points:
        if usable(x, across.log) and usable(y, up.log):
            found.append(f"{'L' if down else 'M'}{across(x):.1f} {up(y):.1f}")
            down = True
        else:
            down = False
    return "".join(found)


def _number(value: float) -> str:
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-")


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal"
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}>{escape(text)}</text>"
