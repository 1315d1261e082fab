"""A quantity over layers and steps, in as many columns as a screen has room for.

A column is a stretch of steps: lowest, mean and highest value of each site, so that no
spike is lost however far one zooms out.

Axes, in this file:  S site · U entry of the run file · N column · H head.
"""

import base64
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.records import Reading
from equipoise.store import Run, Summary

Array = NDArray[np.float64]
Integers = NDArray[np.int64]
FINER = 8
"""Entries read per column: the levels of a run file are 16 apart."""
SITES = 16
"""Sites merged at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """Sites × columns; NaN where nothing finite was read."""

    quantity: str
    sites: list[str]
    """In the order of the model."""
    layers: list[int | None]
    """The layer of each site; None outside the layers."""
    first: Integers
    last: Integers
    low: Array
    mean: Array
    high: Array
    broken: Integers
    """How many values of a cell were NaN or Inf."""
    sampled: bool
    """Whether a column may hold several readings."""


def layer_of(site: str, blocks: Sequence[str]) -> int | None:
    """Return the layer a site belongs to, by the declared blocks or by its number.

    >>> layer_of("h.3.attn", ["h.3", "h.30"]), layer_of("h.12.mlp", [])
    (0, 12)
    >>> layer_of("embed", []) is None
    True
    """
    if blocks:
        inside = (i for i, b in enumerate(blocks) if f"{site}.".startswith(f"{b}."))
        return next(inside, None)
    number = re.search(r"(?:^|\.)(\d{1,6})(?:\.|$)", site)
    return int(number[1]) if number else None


def blocks_of(run: Run) -> list[str]:
    """Return the names of the layers as the run declares them."""
    declared = run.info.details.get("blocks")
    if not isinstance(declared, list):
        return []
    return [block for block in declared if isinstance(block, str)]


def in_model_order(sites: Sequence[str], blocks: Sequence[str]) -> list[str]:
    """Return the sites from the first layer to the last; those outside come last."""

    def place(site: str) -> float:
        layer = layer_of(site, blocks)
        return math.inf if layer is None else layer

    return sorted(sites, key=place)  # stable: within a layer as they were written


def grid(
    run: Run, quantity: str, *, points: int = 400, between: tuple[int, int] | None
) -> Grid:
    """Return a quantity in at most so many columns."""
    found = run.summary(quantity, points=FINER * points, between=between)
    blocks = blocks_of(run)
    sites = in_model_order(list(found), blocks)
    first, last = _columns(list(found.values()))
    cuts = None
    if len(last) > points:
        cuts = np.linspace(0, len(last), points + 1).astype(np.int64)[:-1]
    # Some sites at once: entries are many times what is shown of them.
    groups = (sites[n : n + SITES] for n in range(0, max(1, len(sites)), SITES))
    parts = [_planes([found[site] for site in own], last, cuts) for own in groups]
    planes = np.concatenate(parts, axis=1)
    sampled = cuts is not None or bool((planes[4] > 1).any())
    if cuts is not None:
        first, last = np.minimum.reduceat(first, cuts), np.maximum.reduceat(last, cuts)
    steps = {"first": first, "last": last}
    return _in_layers(quantity, sites, blocks, planes=planes, sampled=sampled, **steps)


def _in_layers(
    quantity: str,
    sites: list[str],
    blocks: Sequence[str],
    *,
    planes: Iterable[NDArray[Any]],
    **columns: Any,
) -> Grid:
    """Return a grid of these planes: lowest, mean, highest, and how many are broken."""
    low, mean, high, broken, *_ = planes
    layers = [layer_of(site, blocks) for site in sites]
    values: dict[str, Any] = {
        "low": low,
        "mean": mean,
        "high": high,
        "broken": broken.astype(np.int64),
    }
    return Grid(quantity=quantity, sites=sites, layers=layers, **values, **columns)


def _columns(parts: Sequence[Summary]) -> tuple[Integers, Integers]:
    """Return the first and the last step of every column that some site has."""
    none = np.zeros(0, np.int64)
    last = np.unique(np.concatenate([none, *_different([p.last for p in parts])]))
    first = last.copy()
    for part in parts:
        np.minimum.at(first, np.searchsorted(last, part.last), part.first)
    return first, last


def _different(columns: Sequence[Integers]) -> list[Integers]:
    """Return each set of columns once: the sites of a layout share theirs."""
    found: list[Integers] = []
    for one in columns:
        if not found or not np.array_equal(one, found[-1]):
            found.append(one)
    return found


def _planes(parts: Sequence[Summary], last: Integers, cuts: Integers | None) -> Array:
    """Return low, mean, high, broken and rows of some sites, cut into columns."""
    planes = np.full((5, len(parts), len(last)), np.nan)
    planes[3:] = 0
    for s, part in enumerate(parts):
        own = np.searchsorted(last, part.last)
        values = (part.low, part.mean, part.high, part.broken, part.rows)
        for p, plane in enumerate(values):
            planes[p, s, own] = plane
    return planes if cuts is None else _merged(planes, cuts)


def _merged(planes: Array, cuts: Integers) -> Array:
    low, mean, high, broken, rows = planes
    weight = np.where(np.isfinite(mean), rows, 0)
    total = np.add.reduceat(np.nan_to_num(mean) * weight, cuts, axis=1)
    count = np.add.reduceat(weight, cuts, axis=1)
    with np.errstate(invalid="ignore"):
        average = total / count  # 0/0 is NaN: a gap
    return np.stack(
        [
            np.fmin.reduceat(low, cuts, axis=1),
            average,
            np.fmax.reduceat(high, cuts, axis=1),
            np.add.reduceat(broken, cuts, axis=1),
            np.add.reduceat(rows, cuts, axis=1),
        ]
    )


def tails(readings: Sequence[Reading], blocks: Sequence[str]) -> list[Grid]:
    """Return the newest readings of each quantity, one column per step."""
    by_name: dict[str, dict[int, Reading]] = {}
    for reading in readings:
        by_name.setdefault(reading.quantity, {})[reading.step] = reading
    return [_tail(name, own, blocks) for name, own in by_name.items()]


def _tail(name: str, own: Mapping[int, Reading], blocks: Sequence[str]) -> Grid:
    steps = np.array(sorted(own), np.int64)
    found = list(dict.fromkeys(s for reading in own.values() for s in reading.sites))
    sites = in_model_order(found, blocks)
    planes = np.full((4, len(sites), len(steps)), np.nan)
    planes[3] = 0
    for n, step in enumerate(steps.tolist()):
        reading = own[step]
        for site, row in zip(reading.sites, reading.values, strict=True):
            finite = [v for v in row if math.isfinite(v)]
            if finite:
                mean = sum(finite) / len(finite)
                planes[:3, sites.index(site), n] = min(finite), mean, max(finite)
            planes[3, sites.index(site), n] = len(row) - len(finite)
    ends = {"first": steps, "last": steps}
    return _in_layers(name, sites, blocks, planes=[*planes], sampled=False, **ends)


def packed(values: NDArray[Any]) -> str:
    """Return values as base64 of little-endian float32: NaN travels as it is."""
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(values, "<f4")
    return base64.b64encode(narrow.tobytes()).decode("ascii")


def grid_json(found: Grid) -> dict[str, Any]:
    """Return a grid as JSON values; what repeats is left out."""
    record: dict[str, Any] = {
        "quantity": found.quantity,
        "sites": found.sites,
        "layers": found.layers,
        "last": found.last.tolist(),
        "mean": packed(found.mean),
        "sampled": found.sampled,
    }
    if not np.array_equal(found.first, found.last):
        record["first"] = found.first.tolist()
    if not _same(found.low, found.mean) or not _same(found.high, found.mean):
        record |= {"low": packed(found.low), "high": packed(found.high)}
    if found.broken.any():
        s, n = np.nonzero(found.broken)
        record["broken"] = [s.tolist(), n.tolist()]
    return record


def _same(a: Array, b: Array) -> bool:
    return bool(np.array_equal(a, b, equal_nan=True))


def heads_json(readings: Sequence[Reading], blocks: Sequence[str]) -> dict[str, Any]:
    """Return head × layer values of some steps: one array, heads padded with NaN."""
    sites = in_model_order(
        list(dict.fromkeys(s for reading in readings for s in reading.sites)), blocks
    )
    rows = [dict(zip(r.sites, r.values, strict=True)) for r in readings]
    width = max((len(v) for row in rows for v in row.values()), default=0)
    values_NSH = np.full((len(rows), len(sites), width), np.nan)
    for n, row in enumerate(rows):
        for s, site in enumerate(sites):
            own: Sequence[float] = row.get(site, ())
            values_NSH[n, s, : len(own)] = own
    return {
        "steps": [reading.step for reading in readings],
        "sites": sites,
        "layers": [layer_of(site, blocks) for site in sites],
        "width": width,
        "values": packed(values_NSH),
        "broken": np.argwhere(_broken(rows, sites)).tolist(),
    }


def _broken(
    rows: Sequence[Mapping[str, Sequence[float]]], sites: Sequence[str]
) -> NDArray[np.bool_]:
    """Return which site of which step has a NaN or an Inf that was recorded."""
    return np.array(
        [
            [not all(map(math.isfinite, row.get(site, ()))) for site in sites]
            for row in rows
        ],
        np.bool_,
    ).reshape(len(rows), len(sites))
