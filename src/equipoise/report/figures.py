"""The figures of a report as pure data: curves over training steps and over layers.

Loss, gradient norm and balance of attention over steps, read at the run file's level of
detail; gradient norms from the first layer to the last.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from equipoise.records import Reading
from equipoise.store import Run, Summary

Numbers = list[float | None]
"""None where there is no finite number: a gap in the curve, never a zero."""

POINTS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a figure."""

    run: str
    label: str
    x: list[int]
    y: Numbers
    low: Numbers = field(default_factory=list)
    """Empty, or the lower edge of a band around the line."""
    high: Numbers = field(default_factory=list)
    faint: bool = False
    """Drawn dotted, as the companion of another line."""
    names: list[str] = field(default_factory=list)
    """Empty, or what each point is called."""
    points: bool = False
    """Marks without a line between them."""


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """All sites of a quantity together, stretch by stretch."""

    step: NDArray[np.int64]
    low: NDArray[np.float64]
    mean: NDArray[np.float64]
    high: NDArray[np.float64]
    broken: NDArray[np.int64]


def pooled(run: Run, quantity: str) -> Pooled | None:
    """Return the quantity over sites and heads; None if the run does not have it."""
    if quantity not in run.quantities:
        return None
    parts = list(run.summary(quantity, points=POINTS).values())
    return _pooled(parts) if any(len(part.last) for part in parts) else None


def _pooled(parts: list[Summary]) -> Pooled:
    step, where = np.unique(
        np.concatenate([part.last for part in parts]), return_inverse=True
    )
    low, high = np.full(len(step), np.nan), np.full(len(step), np.nan)
    np.fmin.at(low, where, np.concatenate([part.low for part in parts]))
    np.fmax.at(high, where, np.concatenate([part.high for part in parts]))
    mean = np.concatenate([part.mean for part in parts])
    known = np.isfinite(mean)
    total = np.bincount(where[known], mean[known], len(step))
    count = np.bincount(where[known], minlength=len(step))
    with np.errstate(invalid="ignore"):
        average = total / count  # 0/0 is NaN: a gap
    broken = np.bincount(
        where, np.concatenate([part.broken for part in parts]), len(step)
    )
    return Pooled(step, low, average, high, broken.astype(np.int64))


def first_break(found: Pooled | None) -> int | None:
    """Return the first step at which a value was NaN or Inf."""
    if found is None or not found.broken.any():
        return None
    return int(found.step[np.flatnonzero(found.broken)[0]])


def numbers(values: Iterable[float]) -> Numbers:
    """Return six significant digits of each, and None for what cannot be drawn."""
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values]


Runs = Mapping[str, Run]
"""What each run is called in the report → the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One figure: what is drawn, how to read it, and what could not be drawn."""

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


Band = tuple[NDArray[np.float64], NDArray[np.float64]]


def loss(runs: Runs) -> Panel:
    """Return the loss."""
    panel = Panel(
        key="loss",
        title="Loss",
        reading="The line is the mean of each stretch of steps, the band its range.",
        x="step",
        y="loss",
    )
    return _add_curves(panel, runs, "loss")


def gradient(runs: Runs) -> Panel:
    """Return the gradient norm of the whole model."""
    panel = Panel(
        key="gradient",
        title="Gradient norm",
        reading="‖∂loss/∂w‖₂ of the whole model, before clipping. A jump often comes "
        "before a spike of the loss; a line that sinks to nothing learns no more.",
        x="step",
        y="norm",
        log=True,
    )
    return _add_curves(panel, runs, "gradient.norm.total")


def _add_curves(panel: Panel, runs: Runs, quantity: str) -> Panel:
    for label, run in runs.items():
        found = _read_pooled(panel, label, run, quantity)
        if found is not None:
            band = (found.low, found.high)
            panel.curves.append(_curve(label, label, found, band=band))
    return panel


def theta(runs: Runs) -> Panel:
    """Return the balance of attention, as quantiles over rows."""
    panel = Panel(
        key="theta",
        title="Balance of attention, θ",
        reading="1: some set of keys holds half of a row's mass, and attention is as "
        "sensitive as it can be. 0: one key holds it all. Line: the median row, "
        "averaged over layers and heads; band: 5th percentile to largest; dotted: "
        "5th percentile of the sharpest head.",
        x="step",
        y="θ",
    )
    for label, run in runs.items():
        _add_theta(panel, label, run)
    return panel


def _add_theta(panel: Panel, label: str, run: Run) -> None:
    low, middle, high = (
        _read_pooled(panel, label, run, f"attention.theta.{q}")
        for q in ("p5", "p50", "p100")
    )
    if middle is not None:
        band = _band(middle, low, high)
        panel.curves.append(_curve(label, label, middle, band=band))
    if low is not None:
        worst = numbers(low.low)
        name = f"{label}, sharpest head"
        panel.curves.append(
            Curve(run=label, label=name, x=low.step.tolist(), y=worst, faint=True)
        )


def _band(middle: Pooled, low: Pooled | None, high: Pooled | None) -> Band | None:
    """Return the edges where all three were read at the same steps."""
    if low is None or high is None:
        return None
    alike = len(low.step) == len(middle.step) == len(high.step)
    return (low.mean, high.mean) if alike else None


def _read_pooled(panel: Panel, label: str, run: Run, quantity: str) -> Pooled | None:
    """Return the quantity, having noted on the panel what is wrong with it."""
    found = pooled(run, quantity)
    if found is None:
        panel.absent.append(f"{label}: {quantity} was not recorded")
    step = first_break(found)
    if step is not None:
        panel.breaks[label] = min(step, panel.breaks.get(label, step))
    return found


def _curve(run: str, label: str, found: Pooled, *, band: Band | None = None) -> Curve:
    low = numbers(band[0]) if band else []
    high = numbers(band[1]) if band else []
    x, y = found.step.tolist(), numbers(found.mean)
    return Curve(run=run, label=label, x=x, y=y, low=low, high=high)


QUANTITY = "gradient.norm"


def layers(runs: Runs) -> Panel:
    """Return the gradient norm of each layer, at the first and at the last sample."""
    panel = Panel(
        key="layers",
        title="Gradient norm per layer",
        reading="At the last sample (solid) and at the first (dotted). A slope is what "
        "the gradient loses or gains on its way back through the layers. Diamonds at "
        "0: parameters outside the layers, such as embeddings.",
        x="layer",
        y="norm",
        log=True,
    )
    for label, run in runs.items():
        if QUANTITY in run.quantities:
            panel.curves.extend(_profiles(label, run))
        else:
            panel.absent.append(f"{label}: {QUANTITY} was not recorded")
    return panel


def _profiles(label: str, run: Run) -> list[Curve]:
    first, last = run.ends(QUANTITY)
    inside = block_sites(run, last)
    curves = [_profile(label, last, inside)]
    if first.step != last.step:
        curves.append(replace(_profile(label, first, inside), faint=True))
    outside = [site for site in last.sites if site and site not in inside]
    if outside:
        curves.append(_outside(label, last, outside))
    return curves


def _profile(label: str, reading: Reading, sites: list[str]) -> Curve:
    values = by_site(reading)
    return Curve(
        run=label,
        label=f"{label}, step {reading.step}",
        x=list(range(1, len(sites) + 1)),
        y=numbers(values.get(site, math.nan) for site in sites),
        names=sites,
    )


def _outside(label: str, reading: Reading, sites: list[str]) -> Curve:
    values = by_site(reading)
    return Curve(
        run=label,
        label=f"{label}, outside the layers",
        x=[0] * len(sites),
        y=numbers(values[site] for site in sites),
        names=sites,
        points=True,
    )


def by_site(reading: Reading) -> dict[str, float]:
    """Return the first value of each site."""
    return {s: v[0] for s, v in zip(reading.sites, reading.values, strict=True)}


def block_sites(run: Run, reading: Reading) -> list[str]:
    """Return the sites that are layers, in the order of the model.

    The run says which they are; where it does not, they are the sites with a number in
    their name, in the order of their numbers.
    """
    declared = run.info.details.get("blocks")
    if declared:
        return [site for site in declared if site in reading.sites]
    numbered = (site for site in reading.sites if re.search(r"\d", site))
    return sorted(numbered, key=lambda s: [int(n) for n in re.findall(r"\d+", s)])


def first_to_last(run: Run) -> float | None:
    """Return the first layer's gradient norm over the last's, at the last sample."""
    if QUANTITY not in run.quantities:
        return None
    last = run.ends(QUANTITY)[1]
    sites, values = block_sites(run, last), by_site(last)
    if len(sites) < 2 or not values[sites[-1]]:
        return None
    return values[sites[0]] / values[sites[-1]]
