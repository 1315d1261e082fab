"""An audit or a pre-flight on the screen: verdict first."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.auditing.audit import Audit
from equipoise.judging.verdict import Verdict
from equipoise.records import Finding, Reading
from equipoise.text.numbers import short
from equipoise.text.tones import terminal

if TYPE_CHECKING:
    from equipoise.auditing.subject import ModelSource

MARKS = {"error": "✗", "warn": "!", "info": "·"}
LAYERS = ("attention", "G", "‖W_Q‖", "‖W_K‖", "‖W_V‖", "‖W_O‖")
HEADS = ("heads ‖W_Q W_Kᵀ‖", "heads ‖W_V W_O‖", "log₁₀ bound")
CHANGES = ("tensor", "relative change", "cosine")
READINGS = ("reading", "lowest", "where", "highest", "where ")
ROWS = 20


def headline(verdict: Verdict) -> str:
    """Return the verdict in one sentence."""
    return f"{verdict.state.capitalize()}: {verdict.sentence}."


def finding_line(found: Finding) -> str:
    """Return one finding, and what to do about it."""
    then = f" Next: {found.advice}." if found.advice else ""
    return f"{MARKS[found.severity]} [{found.code}] {found.message}.{then}"


def layer_rows(audit: Audit) -> list[list[str]]:
    """Return one line for each attention module."""
    gains = audit.reading("projection.G")
    norms = [audit.reading(f"projection.norm.{letter}") for letter in "qkvo"]
    heads = [audit.reading(f"projection.{pair}") for pair in ("qk", "vo")]
    bound = audit.reading("weights.bound.attention")
    return [
        [
            site,
            short(gain),
            *(short(norm[site][0]) for norm in norms),
            *(_range(head.get(site, ())) for head in heads),
            short(bound[site][0]) if site in bound else "",
        ]
        for site, (gain, *_) in gains.items()
        if all(site in norm for norm in norms)
    ]


def _range(values: Sequence[float]) -> str:
    finite = [v for v in values if math.isfinite(v)]
    return f"{short(min(finite))} – {short(max(finite))}" if finite else ""


def change_rows(audit: Audit) -> list[list[str]]:
    """Return what moved since the other checkpoint, the farthest first."""
    if audit.comparison is None:
        return []
    return [
        [change.name, short(change.relative), short(change.cosine)]
        if math.isfinite(change.cosine)
        else [change.name, _unlike(change.relative), "–"]
        for change in audit.comparison.moved
    ]


def _unlike(relative: float) -> str:
    return "was all zeros" if math.isinf(relative) else short(relative)


def print_verdict(
    verdict: Verdict, *, facts: Sequence[str] = (), source: "ModelSource | None" = None
) -> None:
    """Print the verdict, what it stands on, and what was found."""
    console = Console()
    tone = terminal(verdict.state)
    said = headline(verdict)
    said = said if source is None else source.introduce(said)
    console.print(Text(said, tone), soft_wrap=True)
    for line in facts:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    for found in verdict.findings:
        console.print(
            finding_line(found), soft_wrap=True, highlight=False, markup=False
        )


def data_rows(audit: Audit) -> list[list[str]]:
    """Return what was read on the batch: each reading's extremes, and where."""
    if audit.source is None:
        return []
    # Here, not above: weights alone need no table of quantities.
    from equipoise.report.quantities import shown

    return [
        row
        for reading in sorted(audit.readings, key=lambda r: shown(r.quantity).rank)
        if not reading.quantity.startswith(("weights.", "projection."))
        for row in [_extremes(reading)]
        if row
    ]


def _extremes(reading: Reading) -> list[str]:
    """Return a reading's lowest and highest finite values, each with its place."""
    heads = any(len(values) > 1 for values in reading.values)
    places = [
        (value, f"{site or 'the model'}{f', head {head}' if heads else ''}")
        for site, values in zip(reading.sites, reading.values, strict=True)
        for head, value in enumerate(values)
        if math.isfinite(value)
    ]
    if not places:
        return []
    (low, first), (high, last) = min(places), max(places)
    if len(places) == 1:
        return [reading.quantity, short(low), first, "", ""]
    return [reading.quantity, short(low), first, short(high), last]


def print_audit(audit: Audit, *, rows: int = ROWS) -> None:
    """Print the verdict, the findings, and the numbers of each layer."""
    print_verdict(audit.verdict, facts=audit.facts, source=audit.source)
    for columns, lines in audit_tables(audit):
        every, names = common_name([line[0] for line in lines])
        table = Table(caption=every, caption_justify="left")
        for name in columns:
            table.add_column(name.strip(), overflow="fold")
        for name, line in list(zip(names, lines, strict=True))[:rows]:
            table.add_row(*map(Text, (name, *line[1:])))
        Console().print(table)
        if len(lines) > rows:
            Console().print(f"… and {len(lines) - rows} more (--rows, --html)")


def common_name(names: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return what dotted names share, with … for the part that differs, and that part.

    >>> common_name(["layer.0.attention.self", "layer.1.attention.self"])
    ('… of layer.….attention.self', ['0', '1'])
    >>> common_name(["loss", "gradient.norm"])
    (None, ['loss', 'gradient.norm'])
    """
    parts = [name.split(".") for name in names]
    longest = min(map(len, parts), default=1) - 1
    before = _shared(parts, longest)
    after = _shared([part[::-1] for part in parts], longest - before)
    if len(names) < 2 or not before + after:
        return None, list(names)
    some, end = parts[0], -after or None
    kept = [*some[:before], "…", *some[len(some) - after :]]
    return f"… of {'.'.join(kept)}", [".".join(part[before:end]) for part in parts]


def _shared(parts: Sequence[Sequence[str]], most: int) -> int:
    """Return how many leading parts are the same in all."""
    columns = list(zip(*parts, strict=False))[:most]
    return next((k for k, c in enumerate(columns) if len({*c}) > 1), len(columns))


def audit_tables(audit: Audit) -> list[tuple[tuple[str, ...], list[list[str]]]]:
    tables = [
        (READINGS, data_rows(audit)),
        ((*LAYERS, *HEADS), layer_rows(audit)),
        (CHANGES, change_rows(audit)),
    ]
    return [(columns, lines) for columns, lines in tables if lines]
