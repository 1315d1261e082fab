"""What one rank tells the others at the end of a sampled step, as bytes."""

import json
import math
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from equipoise.anatomy.shards import Split
from equipoise.probes.sharing import Part, Parts
from equipoise.records import Finding
from equipoise.watching.collector import Cell, Table
from equipoise.watching.light import Entry


@dataclass(slots=True, kw_only=True)
class Message:
    """One rank's share of a sampled step."""

    table: Table = field(default_factory=dict)
    scalars: list[Entry] = field(default_factory=list)
    """Of every step since the last sample."""
    findings: list[Finding] = field(default_factory=list)
    parts: dict[str, Parts] = field(default_factory=dict)
    """Probe → what this rank holds of readings that no rank can make alone."""
    cost: float = 0.0
    plain: float = 0.0

    def to_bytes(self) -> bytes:
        """Return it packed: names as JSON, numbers as they are, NaN included.

        Parts stand behind: whole matrices of float32 do not get smaller by packing.
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

    def _each_part(self) -> Iterator[tuple[str, str, Part]]:
        for probe, parts in self.parts.items():
            for name, part in parts.items():
                yield probe, name, part

    @classmethod
    def from_bytes(cls, packed: bytes) -> "Message":
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
        )


def _parts(names: list[Any], raw: bytearray) -> dict[str, Parts]:
    found: dict[str, dict[str, Part]] = {}
    start = 0
    for probe, name, part, parts, shape in names:
        count = math.prod(shape)
        values = torch.frombuffer(
            raw, dtype=torch.float32, count=count, offset=4 * start
        )
        whole = Part(values.reshape(shape), Split(part, parts))
        found.setdefault(probe, {})[name] = whole
        start += count
    return dict(found)


def _table(names: list[Any], numbers: list[float]) -> Table:
    table: Table = {}
    start = 0
    for quantity, site, how, first, width in names:
        values = tuple(numbers[start : start + width])
        table.setdefault(quantity, {})[site] = Cell(values, how, first)
        start += width
    return table
