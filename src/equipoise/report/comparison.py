"""Runs side by side: where they part, how they end, and which options differ."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.judging.card import Card
from equipoise.report.changes import is_logarithmic
from equipoise.report.grids import Grid, blocks_of, grid, layer_of
from equipoise.report.page_model import Json, brief, finite
from equipoise.report.quantities import shown
from equipoise.store import Run
from equipoise.text.card import card_words, difference_sentence, differences

Array = NDArray[np.float64]
APART = 6.0
"""A distance of so many scales of the baseline's own noise is a parting."""
LASTING = 4
"""Columns in a row that must be apart: one spike is no parting."""
OPTIONS_LEFT_OUT = ("attention", "blocks", "guessed")
"""Lists of sites are not options."""

SETUP = card_words().titles["setup"]
Grids = Mapping[str, Mapping[str, Grid]]
"""Run → quantity → grid."""


COLUMNS = 200
"""In which runs are compared: enough to date a parting."""


def compared(runs: Mapping[str, Run], *, baseline: str = "") -> Json:
    """Return what differs between a baseline, the first by default, and the others."""
    grids = {
        label: {
            name: grid(run, name, points=COLUMNS, between=None)
            for name in run.quantities
        }
        for label, run in runs.items()
    }
    first = baseline if baseline in runs else next(iter(runs))
    blocks = blocks_of(runs[first])
    return comparison_json(
        grids,
        {label: details_of(run) for label, run in runs.items()},
        baseline=first,
        blocks=blocks,
        cards={label: run.card for label, run in runs.items()},
    )


def details_of(run: Run) -> dict[str, Any]:
    """Return the details of a run, its set-up included."""
    setup = dict(run.card.sections.get("setup", {}))
    several = setup.pop("optimizers", ())
    named = (
        {"optimizer": several[0]}
        if len(several) == 1
        else {f"optimizer {n}": one for n, one in enumerate(several, start=1)}
    )
    return {**run.info.details, **setup, **named}


def comparison_json(
    grids: Grids,
    details: Mapping[str, Mapping[str, Any]],
    *,
    baseline: str,
    blocks: Sequence[str],
    cards: Mapping[str, Card] = MappingProxyType({}),
) -> Json:
    """Return what differs between the baseline and every other run."""
    names = [key for key in grids if key != baseline]
    rows = [_row(grids, baseline, names, q, blocks) for q in _shared(grids)]
    far = sorted(
        (row for row in rows if row["parts"] is not None), key=lambda row: row["parts"]
    )
    return {
        "baseline": baseline,
        "quantities": far,
        "sentence": _sentence(far, baseline),
        "options": options_that_differ(details),
        "loops": loops_that_differ(cards),
    }


def _shared(grids: Grids) -> list[str]:
    """Return the quantities that at least two runs have, the telling ones first."""
    counts: dict[str, int] = {}
    for own in grids.values():
        for name in own:
            counts[name] = counts.get(name, 0) + 1
    shared = [name for name, count in counts.items() if count > 1]
    return sorted(shared, key=lambda name: (shown(name).rank, name))


def _row(
    grids: Grids,
    baseline: str,
    names: Sequence[str],
    quantity: str,
    blocks: Sequence[str],
) -> Json:
    base = grids[baseline].get(quantity)
    best: tuple[int, str, str] | None = None
    for name in names:
        other = grids[name].get(quantity)
        if base is None or other is None:
            continue
        found = parting(base, other)
        if found is not None and (best is None or found[0] < best[0]):
            best = (found[0], found[1], name)
    return {
        "quantity": quantity,
        "parts": best and best[0],
        "site": best and best[1],
        "layer": layer_of(best[1], blocks) if best and best[1] else None,
        "run": best and best[2],
        "ends": [_end(own.get(quantity)) for own in grids.values()],
    }


def _end(grid: Grid | None) -> float | None:
    if grid is None or not grid.mean.size:
        return None
    last = grid.mean[:, -1]
    known = last[np.isfinite(last)]
    return finite(float(known.mean())) if known.size else None


def _sentence(far: Sequence[Json], baseline: str) -> str:
    if not far:
        return f"No quantity that is shared leaves the range of {baseline}."
    first = far[0]
    title = shown(first["quantity"]).title
    where = f" at {first['site']}" if first["site"] else ""
    return (
        f"{first['run']} first parts from {baseline} at step {first['parts']}, in "
        f"{title}{where}; {len(far)} quantities part before the end."
    )


def parting(base: Grid, other: Grid) -> tuple[int, str] | None:
    """Return the step and the site at which another run leaves the baseline for good.

    Distance is measured in scales of the baseline's step-to-step noise, and on a
    logarithmic scale where the quantity is shown on one.
    """
    sites = [site for site in base.sites if site in other.sites]
    if not sites or len(base.last) < LASTING or len(other.last) < LASTING:
        return None
    steps = np.intersect1d(base.last, other.last)
    if len(steps) < 2 * LASTING:
        low = max(base.last[0], other.last[0])
        high = min(base.last[-1], other.last[-1])
        if high <= low:
            return None
        steps = np.unique(np.linspace(low, high, 200).astype(np.int64))
    logarithmic = is_logarithmic(base)
    apart_SN = np.stack(
        [
            _apart(_at(base, site, steps), _at(other, site, steps), logarithmic)
            for site in sites
        ]
    )
    lasting = _runs_of(apart_SN)
    if not lasting.any():
        return None
    n = int(lasting.any(axis=0).argmax())
    s = int(lasting[:, n].argmax())
    return int(steps[n]), sites[s]


def _at(grid: Grid, site: str, steps: NDArray[np.int64]) -> Array:
    """Return the values of a site at the columns that hold the steps."""
    column = np.searchsorted(grid.last, steps).clip(0, len(grid.last) - 1)
    values: Array = grid.mean[grid.sites.index(site)][column]
    return values


def _apart(base: Array, other: Array, logarithmic: bool) -> NDArray[np.bool_]:
    broken = np.isfinite(base) & ~np.isfinite(other)
    with np.errstate(
        divide="ignore", invalid="ignore"
    ):  # what has no logarithm is −Inf
        if logarithmic:
            base, other = np.log(base), np.log(other)
        moves = np.abs(np.diff(base))
    moves = moves[np.isfinite(moves)]
    noise = 1.4826 * float(np.median(moves)) if moves.size else 0.0
    known = base[np.isfinite(base)]
    size = float(np.abs(known).max()) if known.size else 0.0
    least = 0.1 if logarithmic else 0.02 * size
    with np.errstate(invalid="ignore"):
        return (np.abs(other - base) > max(APART * noise, least)) | broken


def _runs_of(apart_SN: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return where LASTING columns in a row are apart, beginning here."""
    count = apart_SN.shape[1] - LASTING + 1
    if count <= 0:
        return np.zeros((len(apart_SN), 1), np.bool_)
    shifted = [apart_SN[:, k : k + count] for k in range(LASTING)]
    return np.asarray(np.logical_and.reduce(shifted), np.bool_)


def options_that_differ(
    details: Mapping[str, Mapping[str, Any]],
) -> list[tuple[str, list[str]]]:
    """Return what the runs say of themselves and do not have in common.

    >>> options_that_differ({"a": {"lr": 1, "n": 2}, "b": {"lr": 3, "n": 2}})
    [('lr', ['1', '3'])]
    """
    flat = [flat_details(own) for own in details.values()]
    names = list(dict.fromkeys(name for own in flat for name in own))
    rows = [(name, [own.get(name, "–") for own in flat]) for name in names]
    return [(name, cells) for name, cells in rows if len(set(cells)) > 1]


def loops_that_differ(cards: Mapping[str, Card]) -> Json:
    """Return in what the loops differ, but their set-ups: those are options."""
    rows = [row for row in differences(cards) if row[0] != SETUP]
    return {"sentence": difference_sentence(cards), "rows": rows}


def flat_details(given: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return details in one line each, under dotted names."""
    found: dict[str, str] = {}
    for name, value in given.items():
        if prefix == "" and name in OPTIONS_LEFT_OUT:
            continue
        if isinstance(value, Mapping) and prefix.count(".") < 3:
            found |= flat_details(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = brief(value)
    return found
