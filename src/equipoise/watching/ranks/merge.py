"""Merge the ranks' shares of a sampled step into one, the same on every rank.

A share travels as a ``RankSample``, packed into bytes. Ranks that saw the same heads
(data parallel) are reduced; ranks that hold different heads of one site (tensor
parallel) are put side by side, in the order of the heads.

Axes, in this file:  H head · Z bin · R rank.
"""

import json
import math
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from equipoise.anatomy.sharding import Split
from equipoise.probes.attention import BINS, HISTOGRAM, QUANTILES, quantile
from equipoise.probes.capture import SiteValues, Table
from equipoise.probes.sharding import Parts, Shard
from equipoise.records import Finding
from equipoise.watching.step.readings import NORM, NORM_PART, Entry


@dataclass(slots=True, kw_only=True)
class RankSample:
    """One rank's share of a sampled step."""

    table: Table = field(default_factory=dict)
    scalars: list[Entry] = field(default_factory=list)
    """Of every step since the last sample."""
    findings: list[Finding] = field(default_factory=list)
    parts: dict[str, Parts] = field(default_factory=dict)
    """Probe → what this rank holds of readings that no rank can make alone."""
    cost: float = 0.0
    plain: float = 0.0
    step: int = 0
    """Which step it is of, as this rank counts."""
    decision: str = ""
    """What this rank's autopilot decides, as JSON."""
    cleared: int = 0
    """Batches so far whose gradients were cleared without a step."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What this rank saw the loop do, by section."""

    def to_bytes(self) -> bytes:
        """Return it packed: names as JSON, numbers as they are, NaN included.

        Parts stand behind: matrices of float32 do not get smaller by packing.
        """
        numbers = array("d", [self.cost, self.plain])
        numbers.extend(value for _, _, value in self.scalars)
        names: list[Any] = []
        for quantity, sites in self.table.items():
            for site, cell in sites.items():
                names.append([quantity, site, cell.how, cell.first, len(cell.values)])
                numbers.extend(cell.values)
        head = {
            "table": names,
            "scalars": [[step, name] for step, name, _ in self.scalars],
            "findings": [finding.to_json() for finding in self.findings],
            "at": [self.step, self.cleared],
            "decision": self.decision,
            "facts": self.facts,
            "parts": [
                [probe, name, *part.split, list(part.values.shape)]
                for probe, name, part in self._each_part()
            ],
        }
        text = json.dumps(head, separators=(",", ":")).encode()
        size = len(text).to_bytes(8, "little")
        packed = zlib.compress(size + text + numbers.tobytes(), 1)
        raw = (part.values.numpy().tobytes() for _, _, part in self._each_part())
        return packed + b"".join(raw)

    def _each_part(self) -> Iterator[tuple[str, str, Shard]]:
        for probe, parts in self.parts.items():
            for name, part in parts.items():
                yield probe, name, part

    @classmethod
    def from_bytes(cls, packed: bytes) -> "RankSample":
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(packed)
        end = 8 + int.from_bytes(raw[:8], "little")
        head = json.loads(raw[8:end])
        numbers = array("d")
        numbers.frombytes(raw[end:])
        cost, plain, *rest = numbers
        count = len(head["scalars"])
        scalars = [
            (step, name, value)
            for (step, name), value in zip(head["scalars"], rest[:count], strict=True)
        ]
        return cls(
            table=_table(head["table"], rest[count:]),
            scalars=scalars,
            findings=[Finding.from_json(line) for line in head["findings"]],
            parts=_parts(head["parts"], bytearray(unpacker.unused_data)),
            cost=cost,
            plain=plain,
            step=head["at"][0],
            cleared=head["at"][1],
            decision=head["decision"],
            facts=head["facts"],
        )


def steps_by_rank(messages: Sequence[RankSample]) -> str:
    """Return which step each rank is at, in words; nothing where all are at one."""
    return _by_rank([message.step for message in messages])


def cleared_by_rank(messages: Sequence[RankSample]) -> str:
    """Return how many batches each rank has left out, in words, where they differ."""
    return _by_rank([message.cleared for message in messages])


def _by_rank(counts: Sequence[int]) -> str:
    if len({*counts}) == 1:
        return ""
    shown = [f"rank {rank}: {count}" for rank, count in enumerate(counts[:8])]
    return ", ".join([*shown, "…"] if len(counts) > 8 else shown)


def _parts(names: list[Any], raw: bytearray) -> dict[str, Parts]:
    found: dict[str, dict[str, Shard]] = {}
    start = 0
    for probe, name, part, parts, shape in names:
        count = math.prod(shape)
        values = torch.frombuffer(
            raw, dtype=torch.float32, count=count, offset=4 * start
        )
        one = Shard(values.reshape(shape), Split(part, parts))
        found.setdefault(probe, {})[name] = one
        start += count
    return dict(found)


def _table(names: list[Any], numbers: list[float]) -> Table:
    table: Table = {}
    start = 0
    for quantity, site, how, first, width in names:
        values = tuple(numbers[start : start + width])
        table.setdefault(quantity, {})[site] = SiteValues(values, how, first)
        start += width
    return table


Row = Sequence[float]
Share = tuple[int, SiteValues]
"""A rank, and what it measured."""
INNER = {f"attention.theta.{n}": q for n, q in QUANTILES.items() if 0 < q < 1}


def join_tables(tables: Sequence[Table]) -> Table:
    """Return the table of all ranks together."""
    shares: dict[str, dict[str, list[Share]]] = {}
    for rank, table in enumerate(tables):
        for quantity, sites in table.items():
            for site, cell in sites.items():
                here = shares.setdefault(quantity, {}).setdefault(site, [])
                here.append((rank, cell))
    counted = {
        site: {rank: ThetaCounts.of(cell) for rank, cell in found}
        for site, found in shares.pop(HISTOGRAM, {}).items()
    }
    return {
        quantity: {
            site: _side_by_side(quantity, found, counted.get(site, {}))
            for site, found in sites.items()
        }
        for quantity, sites in shares.items()
    }


def add_shared(table: Table, shared: Table) -> Table:
    """Return a table with what only all ranks together could read.

    A norm may have both: parts that add up in squares, and a sum that no rank held.
    """
    merged = {quantity: dict(sites) for quantity, sites in table.items()}
    for quantity, sites in shared.items():
        for site, cell in sites.items():
            known = merged.setdefault(quantity, {}).get(site)
            both = known is not None and cell.how == "norm"
            values = _reduced([known, cell]) if known and both else cell.values
            merged[quantity][site] = SiteValues(tuple(values), cell.how)
    return merged


@dataclass(frozen=True, slots=True)
class ThetaCounts:
    """The rows of one rank at one site, in bins of θ."""

    counts_HZ: Any
    rows_H: list[float]
    """How many each head has."""

    @classmethod
    def of(cls, cell: SiteValues) -> "ThetaCounts":
        counts_HZ = np.reshape(cell.values, (-1, BINS))
        return cls(counts_HZ, counts_HZ.sum(1).tolist())


def _side_by_side(
    quantity: str, shares: Sequence[Share], counted: Mapping[int, ThetaCounts]
) -> SiteValues:
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
    return SiteValues(tuple(values), shares[0][1].how)


def _groups(shares: Sequence[Share]) -> Iterator[list[Share]]:
    """Yield the ranks that hold the same heads together, first heads first."""
    groups: dict[int, list[Share]] = {}
    for share in shares:
        groups.setdefault(share[1].first, []).append(share)
    for first in sorted(groups):
        width = max(len(cell.values) for _, cell in groups[first])
        yield [share for share in groups[first] if len(share[1].values) == width]


def _quantiles(ranks: Sequence[ThetaCounts], q: float) -> list[float]:
    """Return one quantile per head over the rows of all these ranks."""
    whole_HZ = sum(rank.counts_HZ for rank in ranks)
    return [quantile(counts_Z.tolist(), q) for counts_Z in whole_HZ]


def _is_mean(shares: Sequence[Share]) -> bool:
    return shares[0][1].how == "mean"


def _weighted(values: Sequence[Row], ranks: Sequence[ThetaCounts]) -> list[float]:
    """Return the mean per head over rows, of which the ranks may have different many.

    A rank whose rows are all padding has NaN and counts for nothing.
    """
    means = []
    weights_HR = zip(*(rank.rows_H for rank in ranks), strict=True)
    for column, weight in zip(zip(*values, strict=True), weights_HR, strict=True):
        total = math.fsum(weight)
        terms = (x * w for x, w in zip(column, weight, strict=True) if w)
        means.append(math.fsum(terms) / total if total else math.nan)
    return means


def _reduced(cells: Sequence[SiteValues]) -> Row:
    how = cells[0].how
    if how == "last":
        return cells[0].values
    columns = zip(*(cell.values for cell in cells), strict=True)
    return [REDUCTIONS[how](column) for column in columns]


def _mean(column: Row) -> float:
    """Return the mean over the ranks that have a number."""
    numbers = [x for x in column if not math.isnan(x)]
    return math.fsum(numbers) / len(numbers) if numbers else math.nan


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


def merge_messages(messages: Sequence[RankSample]) -> RankSample:
    """Return the step as all ranks together saw it."""
    tables = [message.table for message in messages]
    return RankSample(
        table={**join_tables(tables), **disagreement(tables)},
        scalars=_scalars([message.scalars for message in messages]),
        findings=_findings([message.findings for message in messages]),
        # The others wait for the slowest rank.
        cost=max(message.cost for message in messages),
        plain=min(message.plain for message in messages),
    )


REPLICATED = "projection.norm."
"""Norms of weights: ranks that hold the same heads hold the same numbers."""


def disagreement(tables: Sequence[Table]) -> Table:
    """Return by how much ranks differ in the norm of a weight they all hold.

    The largest relative difference over all weights; nothing where no two ranks hold
    the same one.
    """
    found: dict[tuple[str, str, int], list[float]] = {}
    for table in tables:
        for quantity, sites in table.items():
            if quantity.startswith(REPLICATED):
                for site, cell in sites.items():
                    key = quantity, site, cell.first
                    found.setdefault(key, []).append(math.fsum(cell.values))
    held = [norms for norms in found.values() if len(norms) > 1 and max(norms) > 0]
    if not held:
        return {}
    largest = max(1 - min(norms) / max(norms) for norms in held)
    return {"ranks.disagreement": {"": SiteValues((largest,), "max")}}


def _scalars(ranks: Sequence[list[Entry]]) -> list[Entry]:
    """Return the mean loss and the total norm; else the first rank's.

    A loss that is NaN on one rank is NaN: a mean over the others would hide it.
    """
    merged = {(step, name): value for step, name, value in ranks[0]}
    by_name: dict[tuple[int, str], list[float]] = {}
    for entries in ranks:
        for step, name, value in entries:
            by_name.setdefault((step, name), []).append(value)
    for (step, name), values in by_name.items():
        if name == "loss":
            merged[step, name] = sum(values) / len(values)
        elif name == NORM_PART:
            merged.pop((step, name), None)
            merged[step, NORM] = math.hypot(*values)
    return [(step, name, value) for (step, name), value in sorted(merged.items())]


def _findings(ranks: Sequence[list[Finding]]) -> list[Finding]:
    """Return each event once, as the rank nearest its origin saw it.

    A NaN born on one rank reaches the others through the averaged gradient, a step
    later through the weights; the rank that saw it first was closest.
    """
    merged: dict[object, Finding] = {}
    for found in (finding for findings in ranks for finding in findings):
        is_nonfinite = found.belongs_to("nonfinite")
        key = "nonfinite" if is_nonfinite else found.key
        if key not in merged or _earlier(found, merged[key]):
            merged[key] = found
    return list(merged.values())


def _earlier(one: Finding, other: Finding) -> bool:
    order = ["nonfinite.update", "nonfinite.forward", "nonfinite.backward"]

    def place(finding: Finding) -> tuple[int, int]:
        known = finding.code in order
        return finding.step, order.index(finding.code) if known else len(order)

    return place(one) < place(other)
