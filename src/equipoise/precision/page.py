"""A study on the screen, and as one offline page."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from equipoise.precision.study import Row, Study
from equipoise.report.study_page import StudyPage
from equipoise.report.table import short

NOTES = (
    "predicted: relative error of the output if only this module stored its numbers "
    "in the format; squares add up to the total"
)


def headline(study: Study) -> str:
    """Return the verdict in two sentences."""
    scaled = ", tensors scaled" if study.scaled else ""
    kept, missed = study.kept, "" if study.kept.reached else ", missed"
    return (
        f"{study.model} in {study.format}{scaled}: output error "
        f"{short(study.measured)} measured, {short(study.predicted)} predicted. "
        f"Keep {len(kept.sites)} of {len(study.rows)} modules in fp32 for "
        f"{short(kept.measured)} (target {short(kept.target)}{missed})."
    )


def remarks(study: Study) -> list[str]:
    """Return what a reader must not overlook: range, ε, the native run."""
    lines = []
    if study.native is not None:
        lines.append(f"run natively in {study.format}: error {short(study.native)}")
    for row in study.rows:
        if row.range is not None and row.range.overflow > 0:
            share = f"{row.range.overflow:.2%}"
            lines.append(f"{row.site}: {share} of a stored tensor is out of range")
    for name, left in study.lost_epsilons.items():
        lines.append(f"{name}: ε becomes {short(left)} if stored in {study.format}")
    return lines


def cells(row: Row) -> list[str]:
    """Return one line of the table."""
    flushed = "" if row.range is None else f"{row.range.flushed:.1%}"
    measured = "" if row.measured is None else short(row.measured)
    return [
        row.site or "(the model itself)",
        short(row.predicted),
        measured,
        f"{row.share:.1%}",
        row.dominant,
        flushed,
        "fp32" if row.keep else "",
    ]


COLUMNS = ["module", "predicted", "measured", "share", "mostly", "to zero", "keep"]


def print_study(study: Study, *, rows: int = 20) -> None:
    """Print the verdict, the largest modules and the remarks."""
    console = Console()
    console.print(headline(study), soft_wrap=True)
    table = Table(caption=NOTES)
    for name in COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name != "module")
    for row in study.rows[:rows]:
        table.add_row(*cells(row))
    console.print(table)
    if len(study.rows) > rows:
        console.print(f"… and {len(study.rows) - rows} smaller ones (--rows, --html)")
    for line in remarks(study):
        console.print(f"- {line}", soft_wrap=True)


def write_study(study: Study, path: Path) -> Path:
    """Write the study as one page that opens offline, and return where it is."""
    return _PAGE.write(
        path,
        headline=headline(study),
        remarks=remarks(study),
        columns=COLUMNS,
        rows=[(cells(row), row.share, row.keep) for row in study.rows],
        notes=NOTES,
    )


_PAGE = StudyPage(
    title="Precision",
    heading="Where the low-precision error comes from",
    style=""".bar { background: #3b7dd8; height: .6rem; border-radius: 2px;
       min-width: 1px }
tr.keep { background: #f2a90022 }""",
    body="""<div class="wide"><table><thead><tr>
{% for name in columns %}<th scope="col">{{ name }}</th>{% endfor %}
<th scope="col">share</th></tr></thead><tbody>
{% for cells, share, keep in rows %}<tr{% if keep %} class="keep"{% endif %}>
{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}
<td><div class="bar" style="width: {{ '%.2f' | format(100 * share) }}%"></div></td></tr>
{% endfor %}</tbody></table></div>
<p>{{ notes }}. Rows marked are those to keep in fp32.</p>
""",
)
