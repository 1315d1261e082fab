"""An audit or a pre-flight on the screen, and as one offline page: verdict first."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.auditing.audit import Audit
from equipoise.auditing.subject import Source, introduced
from equipoise.forecast.verdict import Verdict
from equipoise.records import Finding
from equipoise.report.pages import StudyPage
from equipoise.report.views import short

TONES = {"healthy": "green", "at risk": "yellow", "not judged": "yellow"}
MARKS = {"error": "✗", "warn": "!", "info": "·"}
QUANTITIES = "docs/quantities"
PAGES = {
    "attention": "docs/audit.md",
    "G": f"{QUANTITIES}/projection-gain.md",
    "‖W_Q‖": f"{QUANTITIES}/projection-gain.md",
    "‖W_K‖": f"{QUANTITIES}/projection-gain.md",
    "‖W_V‖": f"{QUANTITIES}/projection-gain.md",
    "‖W_O‖": f"{QUANTITIES}/projection-gain.md",
    "heads ‖W_Q W_Kᵀ‖": f"{QUANTITIES}/head-products.md",
    "heads ‖W_V W_O‖": f"{QUANTITIES}/head-products.md",
    "log₁₀ bound": f"{QUANTITIES}/lipschitz.md",
    "tensor": "docs/audit.md",
    "relative change": "docs/audit.md",
    "cosine": "docs/audit.md",
}
"""Column → the page that says what its numbers mean."""
LAYERS = ("attention", "G", "‖W_Q‖", "‖W_K‖", "‖W_V‖", "‖W_O‖")
HEADS = ("heads ‖W_Q W_Kᵀ‖", "heads ‖W_V W_O‖", "log₁₀ bound")
CHANGES = ("tensor", "relative change", "cosine")
ROWS = 20


def headline(verdict: Verdict) -> str:
    """Return the verdict in one sentence."""
    return f"{verdict.state.capitalize()}: {verdict.sentence}."


def finding_line(found: Finding) -> str:
    """Return one finding, and what to do about it."""
    then = f" Next: {found.advice}." if found.advice else ""
    return f"{MARKS[found.severity]} [{found.rule}] {found.message}.{then}"


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
        for change in audit.comparison.moved
    ]


def print_verdict(
    verdict: Verdict, *, facts: Sequence[str] = (), source: Source | None = None
) -> None:
    """Print the verdict, what it stands on, and what was found."""
    console = Console()
    tone = TONES.get(verdict.state, "red")
    console.print(Text(introduced(headline(verdict), source), tone), soft_wrap=True)
    for line in facts:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    for found in verdict.findings:
        console.print(
            finding_line(found), soft_wrap=True, highlight=False, markup=False
        )


def print_audit(audit: Audit, *, rows: int = ROWS) -> None:
    """Print the verdict, the findings, and the numbers of each layer."""
    print_verdict(audit.verdict, facts=audit.facts, source=audit.source)
    for columns, lines in _tables(audit):
        table = Table()
        for name in columns:
            table.add_column(name, overflow="fold")
        for line in lines[:rows]:
            table.add_row(*map(Text, line))
        Console().print(table)
        if len(lines) > rows:
            Console().print(f"… and {len(lines) - rows} more (--rows, --html)")


def _tables(audit: Audit) -> list[tuple[tuple[str, ...], list[list[str]]]]:
    tables = [((*LAYERS, *HEADS), layer_rows(audit)), (CHANGES, change_rows(audit))]
    return [(columns, lines) for columns, lines in tables if lines]


def write_audit(audit: Audit, path: Path) -> Path:
    """Write the audit as one page that opens offline, and return where it is."""
    return _PAGE.write(
        path,
        headline=introduced(headline(audit.verdict), audit.source),
        remarks=[*audit.facts, *map(finding_line, audit.findings)],
        tables=_tables(audit),
        pages=PAGES,
    )


_PAGE = StudyPage(
    title="Audit",
    heading="The model as it stands",
    body="""{% for columns, lines in tables %}
<div class="wide" tabindex="0"><table><thead><tr>
{% for name in columns %}<th scope="col"><a href="{{ pages[name] }}">{{ name }}</a></th>
{% endfor %}</tr></thead><tbody>
{% for line in lines %}<tr>{% for cell in line %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endfor %}
""",
)
