"""Figures over training steps: loss, gradient norm, balance of attention."""

import numpy as np
from numpy.typing import NDArray

from equipoise.report.curves import Curve, Pooled, first_break, numbers, pooled
from equipoise.report.panel import Panel, Runs
from equipoise.store import Run

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
    return _filled(panel, runs, "loss")


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
    return _filled(panel, runs, "gradient.norm.total")


def _filled(panel: Panel, runs: Runs, quantity: str) -> Panel:
    for label, run in runs.items():
        found = _noted(panel, label, run, quantity)
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
        _noted(panel, label, run, f"attention.theta.{q}") for q in ("p5", "p50", "p100")
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


def _noted(panel: Panel, label: str, run: Run, quantity: str) -> Pooled | None:
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
