"""A study of selection on the screen, and as one offline page."""

import math
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from equipoise.auditing.selection.study import SelectionRow, SelectionStudy
from equipoise.auditing.subject import ModelSource, introduced
from equipoise.report.offline_pages import StudyPage
from equipoise.text.numbers import short

COLUMNS = (
    *("layer", "head", "verdict", "even", "growth", "first"),
    *("range", "lift", "recall", "random"),
)
NOTES = (
    "even: effective keys e^H over visible ones · growth: b in e^H ~ n^b, 1 spreads "
    "with the context, 0 holds · first: mass on the first key · lift: distance of "
    "the chosen tokens from the rest over that of random ones · recall: chosen tokens "
    "nearer to their sum than any other, beside random ones"
)
SAYS = {
    "selects": "select",
    "spreads": "spread out as the context grows",
    "flat": "are flat",
    "sink": "rest on the first key",
    "unread": "could not be read",
}


def headline(study: SelectionStudy) -> str:
    """Return the verdict in two sentences."""
    counts = ", ".join(f"{n} {SAYS[kind]}" for kind, n in study.counts.items())
    widest = max((r.rho for r in study.rows if not math.isnan(r.rho)), default=math.nan)
    return (
        f"{study.model}, up to {study.keys} keys: of {len(study.rows)} heads {counts}. "
        f"One key needs a range of {short(study.needed)} between logits to hold half "
        f"of the mass; the widest head has {short(widest)}."
    )


def cells(row: SelectionRow) -> list[str]:
    """Return one line of the table; what could not be read is empty."""
    numbers = (row.evenness, row.growth, row.sink, row.rho, row.lift)
    shown = ["" if math.isnan(n) else f"{n:.2g}" for n in numbers]
    recalls = (row.recall, row.recall_random)
    shares = ["" if math.isnan(n) else f"{n:.0%}" for n in recalls]
    return [row.site, str(row.head), row.verdict, *shown, *shares]


def print_study(
    study: SelectionStudy, *, rows: int = 40, source: ModelSource | None = None
) -> None:
    """Print the verdict and the flattest heads."""
    console = Console()
    console.print(introduced(headline(study), source), soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name != "layer")
    worst = flattest_first(study)
    for row in worst[:rows]:
        table.add_row(*cells(row))
    console.print(table)
    console.print(notes(study), style="dim")
    if left := len(worst[rows:]):
        console.print(f"… and {left} heads that are less even (--rows, --html)")


def flattest_first(study: SelectionStudy) -> list[SelectionRow]:
    """Return the heads in the order in which they are shown."""
    return sorted(study.rows, key=lambda row: -_order(row))


def notes(study: SelectionStudy) -> str:
    """Return what the columns mean."""
    return f"{NOTES} · {study.chosen} chosen"


def _order(row: SelectionRow) -> float:
    return -math.inf if math.isnan(row.evenness) else row.evenness


def write_study(
    study: SelectionStudy, path: Path, *, source: ModelSource | None = None
) -> Path:
    """Write the study as one page that opens offline, and return where it is."""
    by_site = groupby(study.rows, key=lambda row: row.site)
    return _PAGE.write(
        path,
        headline=introduced(headline(study), source),
        counts=study.counts,
        says=SAYS,
        layers=[(site, list(rows)) for site, rows in by_site],
        columns=COLUMNS,
        rows=[cells(row) for row in flattest_first(study)],
        notes=notes(study),
    )


_PAGE = StudyPage(
    title="Selection",
    heading="Which heads select",
    style=""".head { display: inline-block; min-width: 1.6rem; padding: 0 .2rem;
        margin: 1px; text-align: center; border-radius: 2px; color: #fff }
.selects { background: #2b7a44 } .spreads { background: #8a6100 }
.flat { background: #b3402a } .sink { background: #2f66b3 }
.unread { background: #666 }""",
    body="""<h2>Layer by layer</h2>
<p>{% for kind, count in counts.items() %}
<span class="head {{ kind }}">{{ kind }}</span> {{ count }} {{ says[kind] }}
{{ "" if loop.last else "·" }}{% endfor %}</p>
<div class="wide" tabindex="0"><table><tbody>{% for site, heads in layers %}
<tr><th scope="row">{{ site }}</th><td>{% for row in heads %}
<span class="head {{ row.verdict }}"
 title="head {{ row.head }}: {{ row.verdict }}">{{ row.head }}</span>
{% endfor %}</td></tr>{% endfor %}</tbody></table></div>
<h2>Every head, the flattest first</h2>
<div class="wide" tabindex="0"><table><thead><tr>
{% for name in columns %}<th scope="col">{{ name }}</th>{% endfor %}
</tr></thead><tbody>{% for cells in rows %}
<tr>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div>
<p>{{ notes }}.</p>
""",
)
