"""An audit or a pre-flight as one page that opens offline: verdict first."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.auditing.audit import Audit
from equipoise.auditing.page import audit_tables, finding_line, headline
from equipoise.auditing.subject import introduced
from equipoise.report.offline_pages import StudyPage
from equipoise.report.quantities import shown

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


def write_audit(audit: Audit, path: Path) -> Path:
    """Write the audit as one page that opens offline, and return where it is."""
    tables = audit_tables(audit)
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
