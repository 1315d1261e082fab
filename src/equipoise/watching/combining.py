"""Many ranks' shares of a step become one, the same on every rank."""

import math
from collections.abc import Callable, Sequence

from equipoise.records import Finding
from equipoise.watching.collector import Cell, Table
from equipoise.watching.light import Entry
from equipoise.watching.message import Message

Row = Sequence[float]


def combined(messages: Sequence[Message]) -> Message:
    """Return the step as all ranks together saw it."""
    return Message(
        table=_tables([message.table for message in messages]),
        scalars=_scalars([message.scalars for message in messages]),
        findings=_findings([message.findings for message in messages]),
        # The slowest rank is the one everybody waits for.
        cost=max(message.cost for message in messages),
        plain=min(message.plain for message in messages),
    )


def _tables(tables: Sequence[Table]) -> Table:
    found: dict[tuple[str, str], list[Cell]] = {}
    for table in tables:
        for quantity, sites in table.items():
            for site, cell in sites.items():
                found.setdefault((quantity, site), []).append(cell)
    out: Table = {}
    for (quantity, site), cells in found.items():
        out.setdefault(quantity, {})[site] = _cell(cells)
    return out


def _cell(cells: Sequence[Cell]) -> Cell:
    how = cells[0].how
    width = max(len(cell.values) for cell in cells)
    whole = [cell.values for cell in cells if len(cell.values) == width]
    if how == "last":
        return Cell(whole[0], how)
    columns = zip(*whole, strict=True)
    return Cell(tuple(REDUCTIONS[how](column) for column in columns), how)


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


def _scalars(ranks: Sequence[list[Entry]]) -> list[Entry]:
    """Return the mean loss of each step; of everything else the first rank's value.

    A loss that is NaN on one rank is NaN: a mean over the others would hide it.
    """
    first = {(step, name): value for step, name, value in ranks[0]}
    losses: dict[int, list[float]] = {}
    for entries in ranks:
        for step, name, value in entries:
            if name == "loss":
                losses.setdefault(step, []).append(value)
    for step, values in losses.items():
        first[step, "loss"] = sum(values) / len(values)
    return [(step, name, value) for (step, name), value in sorted(first.items())]


def _findings(ranks: Sequence[list[Finding]]) -> list[Finding]:
    """Return each event once: where several ranks saw it, as the nearest witness did.

    A NaN born on one rank reaches the others through the averaged gradient; the rank
    that saw it in its forward pass stood closest.
    """
    order = {"nonfinite.update": 0, "nonfinite.forward": 1, "nonfinite.backward": 2}
    merged: dict[tuple[int, str], Finding] = {}
    for found in (finding for findings in ranks for finding in findings):
        family = found.rule.split(".")[0]
        key = (
            found.step,
            family if family == "nonfinite" else f"{found.rule}{found.site}",
        )
        old = merged.get(key)
        if old is None or order.get(found.rule, 9) < order.get(old.rule, 9):
            merged[key] = found
    return list(merged.values())
