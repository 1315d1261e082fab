"""What several ranks measured at one site becomes one reading.

Ranks that saw the same heads (data parallel) are reduced; ranks that hold different
heads of one site (tensor parallel) are put side by side, in the order of the heads.
"""

import math
from collections.abc import Callable, Iterator, Sequence

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
    histograms = shares.pop(HISTOGRAM, {})
    return {
        quantity: {
            site: _side_by_side(quantity, found, histograms.get(site, []))
            for site, found in sites.items()
        }
        for quantity, sites in shares.items()
    }


def _side_by_side(
    quantity: str, shares: Sequence[Share], histograms: Sequence[Share]
) -> Cell:
    counts = {rank: _by_head(cell) for rank, cell in histograms}
    values: list[float] = []
    for together in _groups(shares):
        rows = [counts[rank] for rank, _ in together if rank in counts]
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


def _by_head(cell: Cell) -> list[Row]:
    """Return each head's counts."""
    return [cell.values[i : i + BINS] for i in range(0, len(cell.values), BINS)]


def _quantiles(rows: Sequence[list[Row]], q: float) -> list[float]:
    """Return one quantile per head over the rows of all these ranks."""
    heads = zip(*rows, strict=True)
    return [quantile([sum(n) for n in zip(*h, strict=True)], q) for h in heads]


def _is_mean(shares: Sequence[Share]) -> bool:
    return shares[0][1].how == "mean"


def _weighted(values: Sequence[Row], rows: Sequence[list[Row]]) -> list[float]:
    """Return the mean per head over rows, of which the ranks may have different many.

    A rank whose rows are all padding says NaN and counts for nothing.
    """
    means = []
    weights = [[sum(counts) for counts in heads] for heads in rows]
    columns = zip(zip(*values, strict=True), zip(*weights, strict=True), strict=True)
    for column, weight in columns:
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
