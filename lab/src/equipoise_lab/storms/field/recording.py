"""What is kept of a unit: everything that judging needs, in about 50 kB.

Readings are kept in the order they were recorded, as float32 with 16 bits after the
point, and what checks read as it was, so that a changed rule or check judges again
without training.
"""

import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.errors import InputError
from equipoise.judging.facts import Facts
from equipoise.records import Finding, Reading
from equipoise.store import open_run
from equipoise_lab.storms.field.manifest import Unit

LOST = 7
"""Low bits of a float32 that are not kept: 16 of 23 stay, a relative 1.5e-5."""
SUFFIX = ".field"
Layout = tuple[str, tuple[str, ...], tuple[int, ...]]
"""Quantity, sites, and how many values each site has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One unit as it ran."""

    unit: str
    losses: Sequence[float]
    """Plain cross-entropy of every batch as it was trained on."""
    validation: float
    """Mean plain cross-entropy over held batches at the end; infinite if not finite."""
    details: Mapping[str, Any]
    readings: Sequence[Reading]
    findings: Sequence[Finding]
    """What was found while it ran: checks, gaps, numbers that are not finite."""
    facts: Sequence[Facts] = ()
    """What the loop was seen to do in each sampled step; none in older records."""
    seconds: float = 0.0
    """CPU seconds, the instrument's included."""
    refused: str = ""
    """Why the instrument could not watch it."""
    versions: Mapping[str, str] = field(default_factory=dict)


def place(folder: Path, unit: Unit) -> Path:
    return folder / unit.part / f"{unit.name}{SUFFIX}"


def from_run(path: Path) -> tuple[Mapping[str, Any], list[Reading], list[Finding]]:
    """Return details, readings and findings of a run file, in order."""
    run, cursor = open_run(path), 0
    readings, findings = list[Reading](), list[Finding]()
    while True:
        news, after = run.since(cursor)
        readings += news.readings
        findings += news.findings
        if after == cursor:
            return run.info.details, readings, findings
        cursor = after


def write(path: Path, recorded: Recorded) -> None:
    """Write a unit, whole or not at all."""
    layouts: dict[Layout, int] = {}
    order, steps = list[int](), list[int]()
    rows: list[list[float]] = []
    for reading in recorded.readings:
        layout = reading.quantity, reading.sites, tuple(map(len, reading.values))
        number = layouts.setdefault(layout, len(layouts))
        if number == len(rows):
            rows.append([])
        order.append(number)
        steps.append(reading.step)
        rows[number] += [value for row in reading.values for value in row]
    head = {
        "unit": recorded.unit,
        "losses": [float(f"{loss:.5g}") for loss in recorded.losses],
        "validation": recorded.validation,
        "details": dict(recorded.details),
        "findings": [json.loads(finding.to_json()) for finding in recorded.findings],
        "facts": [asdict(facts) for facts in recorded.facts],
        "seconds": recorded.seconds,
        "refused": recorded.refused,
        "versions": dict(recorded.versions),
        "layouts": list(layouts),
        "order": order,
        "steps": steps,
    }
    values = np.array([value for row in rows for value in row], np.float32)
    top = json.dumps(head).encode()
    body = len(top).to_bytes(4, "little") + top + _planes(values)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_bytes(lzma.compress(body, preset=6))
    temporary.replace(path)


def _planes(values: npt.NDArray[np.float32]) -> bytes:
    """Return the values rounded, byte by byte of all of them: that compresses well."""
    bits = values.view(np.uint32)
    finite = np.isfinite(values)
    rounded = (bits + np.uint32(1 << (LOST - 1))) >> LOST << LOST
    return np.where(finite, rounded, bits).view(np.uint8).reshape(-1, 4).T.tobytes()


def read(path: Path) -> Recorded:
    """Return a unit as it was written.

    Raises:
        InputError: If the file is damaged.
    """
    try:
        body = lzma.decompress(path.read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise InputError(
            f"{path} is damaged ({error}): delete it and make it"
        ) from error
    size = int.from_bytes(body[:4], "little")
    head = json.loads(body[4 : 4 + size])
    planes = np.frombuffer(body[4 + size :], np.uint8).reshape(4, -1)
    values = np.ascontiguousarray(planes.T).view(np.float32).ravel()
    layouts = head.pop("layouts")
    readings = list(_readings(layouts, head.pop("order"), head.pop("steps"), values))
    findings = [Finding.from_dict(one) for one in head.pop("findings")]
    facts = [Facts(**one) for one in head.pop("facts", ())]
    return Recorded(**head, readings=readings, findings=findings, facts=facts)


def _readings(
    layouts: Sequence[Any],
    order: Sequence[int],
    steps: Sequence[int],
    values: npt.NDArray[np.float32],
) -> Iterator[Reading]:
    counts = np.bincount(order, minlength=len(layouts)) if order else np.zeros(0, int)
    sizes = [sum(widths) for _, _, widths in layouts]
    # Values of one layout follow each other: where those of each begin.
    at = np.concatenate([[0], np.cumsum(counts * sizes)]).astype(int).tolist()
    for number, step in zip(order, steps, strict=True):
        quantity, sites, widths = layouts[number]
        rows = []
        for width in widths:
            rows.append(tuple(values[at[number] : at[number] + width].tolist()))
            at[number] += width
        yield Reading(
            step=step, quantity=quantity, sites=tuple(sites), values=tuple(rows)
        )
