"""An audit or a pre-flight on the screen, and as one offline page: verdict first."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.auditing.audit import Audit
from equipoise.auditing.subject import ModelSource, introduced
from equipoise.judging.verdict import Verdict
from equipoise.records import Finding, Reading
from equipoise.report.offline_pages import StudyPage
from equipoise.report.quantities import shown
from equipoise.report.report_model import short
from equipoise.text.tones import terminal

MARKS = {"error": "✗", "warn": "!", "info": "·"}
GAIN = ("projection-gain", "spectral norms of a layer's maps; G is their product")
HEAD = ("head-products", "spectral norms of each head's two products")
AUDIT = ("audit", "what an audit measures, and what it compares it with")
MEANINGS = {
    "attention": AUDIT,
    "G": GAIN,
    **dict.fromkeys(("‖W_Q‖", "‖W_K‖", "‖W_V‖", "‖W_O‖"), GAIN),
    **dict.fromkeys(("heads ‖W_Q W_Kᵀ‖", "heads ‖W_V W_O‖"), HEAD),
    "log₁₀ bound": ("lipschitz", "how much attention can amplify a change, at most"),
    **dict.fromkeys(("tensor", "relative change", "cosine"), AUDIT),
}
"""Column → the page of the docs on its numbers, and what it says in a few words."""
PAGES = {
    "attention": "theta",
    "attention.max_logit": "max-logit",
    "attention.entropy": "entropy",
    "attention.sink": "sink",
    "attention.lipschitz": "lipschitz",
    "attention.B": "magnitude",
    "residual.B": "magnitude",
    "residual.token_cosine": "token-cosine",
    "residual.kurtosis": "kurtosis",
    "projection": "projection-gain",
    "sensitivity": "sensitivity",
    "gradient": "gradient-norm",
    "backward": "backward-factors",
    "norm": "norm-scale",
    "update": "update-ratio",
    "router": "router",
    "selection": "selection",
    "precision.kappa_softmax": "kappa-softmax",
    "precision": "rms-error",
    "curvature": "sharpness",
    "output": "output-logits",
    "loss": "loss",
    "learning_rate": "loss",
}
"""How a reading's name begins → its page of the docs; the longest that fits counts."""
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
    verdict: Verdict, *, facts: Sequence[str] = (), source: ModelSource | None = None
) -> None:
    """Print the verdict, what it stands on, and what was found."""
    console = Console()
    tone = terminal(verdict.state)
    console.print(Text(introduced(headline(verdict), source), tone), soft_wrap=True)
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
    for columns, lines in _tables(audit):
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


def _tables(audit: Audit) -> list[tuple[tuple[str, ...], list[list[str]]]]:
    tables = [
        (READINGS, data_rows(audit)),
        ((*LAYERS, *HEADS), layer_rows(audit)),
        (CHANGES, change_rows(audit)),
    ]
    return [(columns, lines) for columns, lines in tables if lines]


def write_audit(audit: Audit, path: Path) -> Path:
    """Write the audit as one page that opens offline, and return where it is."""
    tables = _tables(audit)
    return _PAGE.write(
        path,
        headline=introduced(headline(audit.verdict), audit.source),
        remarks=[*audit.facts, *map(finding_line, audit.findings)],
        tables=tables,
        page_of=page_of,
        meanings=_meanings(tables),
    )


def page_of(name: str) -> str:
    """Return the page of the docs on a column or a reading; none for other cells.

    >>> page_of("‖W_Q‖"), page_of("precision.kappa_softmax.max"), page_of("0.5")
    ('projection-gain', 'kappa-softmax', '')
    """
    if name in MEANINGS:
        return MEANINGS[name][0]
    return PAGES[max(fits, key=len)] if (fits := _prefixes(name)) else ""


def _prefixes(name: str) -> list[str]:
    return [known for known in PAGES if f"{name}.".startswith(f"{known}.")]


def _meanings(
    tables: Sequence[tuple[tuple[str, ...], list[list[str]]]],
) -> dict[str, str]:
    """Return page → what the numbers that link to it are, in a few words."""
    found: dict[str, str] = {}
    for columns, lines in tables:
        for name in (*columns, *(line[0] for line in lines)):
            if name in MEANINGS:
                found[MEANINGS[name][0]] = MEANINGS[name][1]
            elif page := page_of(name):
                own = shown(name)
                unit = f" ({own.unit})" if own.unit else ""
                found.setdefault(page, f"{own.title}{unit}")
    return found


_PAGE = StudyPage(
    title="Audit",
    heading="The model as it stands",
    style=".sentence, li { overflow-wrap: anywhere }",
    body="""{% macro cell(name) %}{% set page = page_of(name) %}
{% if page %}<a href="#{{ page }}">{{ name }}</a>{% else %}{{ name }}{% endif %}
{% endmacro %}
{% for columns, lines in tables %}
<div class="wide" tabindex="0"><table><thead><tr>
{% for name in columns %}<th scope="col">{{ cell(name) }}</th>
{% endfor %}</tr></thead><tbody>
{% for line in lines %}<tr><td>{{ cell(line[0]) }}</td>
{% for value in line[1:] %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endfor %}
{% if meanings %}<h2>What the numbers are</h2>
<dl>{% for page, words in meanings.items() %}<dt id="{{ page }}">{{ words }}</dt>
<dd>docs, page <b>{{ page }}</b></dd>{% endfor %}</dl>{% endif %}
""",
)
