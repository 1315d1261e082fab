"""What several ranks measured at one site becomes one reading.

Ranks that saw the same heads (data parallel) are reduced; ranks that hold different
heads of one site (tensor parallel) are put side by side, in the order of the heads.

Axes, in this file:  H head · Z bin · R rank.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.probes.attention import QUANTILES
from equipoise.probes.histogram import BINS, HISTOGRAM, quantile
from equipoise.watching.collector import Cell, Table

Row = Sequence[float]
Share = tuple[int, Cell]
"""A rank, and what it measured."""
INNER = {f"attention.theta.{n}": q for n, q in QUANTILES.items() if 0 < q < 1}


def joined(tables: Sequence[Table]) -> Table:
    """Return the table all ranks would have written together."""
    shares: dict[str, dict[str, list[Share]]] = {}
    for rank, table in enumerate(tables):
        for quantity, sites in table.items():
            for site, cell in sites.items():
                here = shares.setdefault(quantity, {}).setdefault(site, [])
                here.append((rank, cell))
    counted = {
        site: {rank: Counts.of(cell) for rank, cell in found}
        for site, found in shares.pop(HISTOGRAM, {}).items()
    }
    return {
        quantity: {
            site: _side_by_side(quantity, found, counted.get(site, {}))
            for site, found in sites.items()
        }
        for quantity, sites in shares.items()
    }


def completed(table: Table, shared: Table) -> Table:
    """Return a table with what only all ranks together could read.

    A norm may have both: parts that add up in squares, and a sum nobody held.
    """
    whole = {quantity: dict(sites) for quantity, sites in table.items()}
    for quantity, sites in shared.items():
        for site, cell in sites.items():
            known = whole.setdefault(quantity, {}).get(site)
            both = known is not None and cell.how == "norm"
            values = _reduced([known, cell]) if known and both else cell.values
            whole[quantity][site] = Cell(tuple(values), cell.how)
    return whole


@dataclass(frozen=True, slots=True)
class Counts:
    """The rows of one rank at one site, in bins of θ."""

    counts_HZ: Any
    rows_H: list[float]
    """How many each head has."""

    @classmethod
    def of(cls, cell: Cell) -> "Counts":
        counts_HZ = np.reshape(cell.values, (-1, BINS))
        return cls(counts_HZ, counts_HZ.sum(1).tolist())


def _side_by_side(
    quantity: str, shares: Sequence[Share], counted: Mapping[int, Counts]
) -> Cell:
    values: list[float] = []
    for together in _groups(shares):
        rows = [counted[rank] for rank, _ in together if rank in counted]
        known = len(rows) == len(together) > 1
        if known and quantity in INNER:
            values += _quantiles(rows, INNER[quantity])
        elif known and quantity.startswith("attention.") and _is_mean(together):
            values += _weighted([cell.values for _, cell in together], rows)
        else:
            values += _reduced([cell for _, cell in together])
    return Cell(tuple(values), shares[0][1].how)


def _groups(shares: Sequence[Share]) -> Iterator[list[Share]]:
    """Yield the ranks that hold the same heads together, first heads first."""
    groups: dict[int, list[Share]] = {}
    for share in shares:
        groups.setdefault(share[1].first, []).append(share)
    for first in sorted(groups):
        width = max(len(cell.values) for _, cell in groups[first])
        yield [share for share in groups[first] if len(share[1].values) == width]


def _quantiles(ranks: Sequence[Counts], q: float) -> list[float]:
    """Return one quantile per head over the rows of all these ranks."""
    whole_HZ = sum(rank.counts_HZ for rank in ranks)
    return [quantile(counts_Z.tolist(), q) for counts_Z in whole_HZ]


def _is_mean(shares: Sequence[Share]) -> bool:
    return shares[0][1].how == "mean"


def _weighted(values: Sequence[Row], ranks: Sequence[Counts]) -> list[float]:
    """Return the mean per head over rows, of which the ranks may have different many.

    A rank whose rows are all padding says NaN and counts for nothing.
    """
    means = []
    weights_HR = zip(*(rank.rows_H for rank in ranks), strict=True)
    for column, weight in zip(zip(*values, strict=True), weights_HR, strict=True):
        total = math.fsum(weight)
        terms = (x * w for x, w in zip(column, weight, strict=True) if w)
        means.append(math.fsum(terms) / total if total else math.nan)
    return means


def _reduced(cells: Sequence[Cell]) -> Row:
    how = cells[0].how
    if how == "last":
        return cells[0].values
    columns = zip(*(cell.values for cell in cells), strict=True)
    return [REDUCTIONS[how](column) for column in columns]


def _mean(column: Row) -> float:
    """Return the mean over the ranks that had something to say."""
    said = [x for x in column if not math.isnan(x)]
    return math.fsum(said) / len(said) if said else math.nan


def _worst(pick: Callable[[Row], float]) -> Callable[[Row], float]:
    """Return max or min with NaN winning: what is broken anywhere is broken."""
    return lambda column: math.nan if any(map(math.isnan, column)) else pick(column)


REDUCTIONS: dict[str, Callable[[Row], float]] = {
    "mean": _mean,
    "max": _worst(max),
    "min": _worst(min),
    "sum": sum,
    "norm": lambda column: math.hypot(*column),
}
