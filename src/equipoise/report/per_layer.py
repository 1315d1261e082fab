"""Gradient norms from the first layer to the last."""

import math
import re
from dataclasses import replace

from equipoise.records import Reading
from equipoise.report.curves import Curve, numbers
from equipoise.report.panel import Panel, Runs
from equipoise.store import Run

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
