"""A study on the screen, and as one offline page."""

import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from equipoise.auditing.precision.study import FINITE, PrecisionRow, PrecisionStudy
from equipoise.auditing.subject import ModelSource, introduced
from equipoise.report.offline_pages import StudyPage
from equipoise.text.numbers import short

NOTES = (
    "predicted: relative error of the output if only this module stored its numbers "
    "in the format; squares add up to the total"
)

OUT_OF_RANGE = 5
"""Modules named whose numbers leave the range."""


WHY = (
    "why they differ: a native kernel sums in float32 and rounds once, the emulation "
    "rounds every number that is stored between operations, and the prediction adds "
    "those roundings up as if they were independent"
)


def headline(study: PrecisionStudy) -> str:
    """Return the verdict in two sentences; the native run first, where there is one."""
    scaled = ", tensors scaled" if study.scaled else ""
    kept, missed = study.keep_list, "" if study.keep_list.reached else ", missed"
    target = "any finite error" if kept.target == FINITE else short(kept.target)
    return (
        f"{study.model} in {study.format}{scaled}: output error {_errors(study)}. "
        f"Keep {len(kept.sites)} of {len(study.rows)} modules in fp32 for "
        f"{_error(kept.measured)} (emulated; target {target}{missed})."
    )


def _errors(study: PrecisionStudy) -> str:
    emulated, predicted = _error(study.measured), _error(study.predicted)
    if study.native is None:
        return f"{emulated} emulated, {predicted} predicted"
    native = _error(study.native)
    return f"{native} run natively ({emulated} emulated, {predicted} predicted)"


def _error(size: float) -> str:
    return short(size) if math.isfinite(size) else "not finite"


def remarks(study: PrecisionStudy) -> list[str]:
    """Return what a reader must not overlook: range, ε, the native run."""
    lines = []
    if study.native is not None:
        lines.append(WHY)
    if study.native_failure:
        lines.append(
            f"the model does not run natively in {study.format}: {study.native_failure}"
        )
    beyond = {
        row.site: row.range.overflow
        for row in study.rows
        if row.range is not None and row.range.overflow > 0
    }
    for site in sorted(beyond, key=beyond.__getitem__, reverse=True)[:OUT_OF_RANGE]:
        share = f"{beyond[site]:.2%}"
        lines.append(
            f"{named(study, site)}: {share} of a stored tensor is out of range"
        )
    if len(beyond) > OUT_OF_RANGE:
        more = len(beyond) - OUT_OF_RANGE
        lines.append(f"so are numbers of {more} other modules, by smaller shares")
    return lines + _lost(study)


def _lost(study: PrecisionStudy) -> list[str]:
    """Return one line for each number that an ε becomes, and the norms it is in."""
    norms: dict[float, list[str]] = {}
    for name, left in study.lost_epsilons.items():
        norms.setdefault(left, []).append(name or "the model")
    return [
        f"ε becomes {short(left)} where the norm itself runs in {study.format} (stock "
        f"kernels add it in float32): {_listed(names)}"
        for left, names in norms.items()
    ]


def _listed(names: list[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} others"


def named(study: PrecisionStudy, site: str) -> str:
    """Return what a row is about: a module, or what one with children does itself."""
    inside = any(row.site.startswith(f"{site}.") for row in study.rows)
    if not site or inside:
        return f"own operations of {site or 'the model'}"
    return site


def keep_code(study: PrecisionStudy) -> str:
    """Return the code that applies the advice to a model in float32."""
    sites, narrow = study.keep_list.sites, DTYPES.get(study.format)
    if not sites or narrow is None:
        return ""
    names = "".join(f"    {site!r},\n" for site in sites)
    return KEEP.format(names=names, narrow=narrow)


DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
"""The formats in which a whole model can run."""
KEEP = """import torch
from equipoise.remedies.catalogue import remedy

kept = [
{names}]
undo = remedy("keep_fp32", modules=kept, narrow={narrow}).apply(model)"""


def cells(study: PrecisionStudy, row: PrecisionRow) -> list[str]:
    """Return one line of the table; nothing to say is an empty cell."""
    flushed = 0.0 if row.range is None else row.range.flushed
    return [
        named(study, row.site),
        _error(row.predicted),
        "" if row.measured is None else _error(row.measured),
        f"{row.share:.1%}",
        row.dominant,
        ("<0.1%" if flushed < 0.001 else f"{flushed:.1%}") if flushed else "",
        "fp32" if row.keep else "",
    ]


COLUMNS = ["module", "predicted", "measured", "share", "mostly", "to zero", "keep"]


def table(study: PrecisionStudy) -> tuple[list[str], list[list[str]]]:
    """Return the columns in which some row has something, and the rows' cells."""
    lines = [cells(study, row) for row in study.rows]
    used = [i for i in range(len(COLUMNS)) if any(line[i] for line in lines)]
    return [COLUMNS[i] for i in used], [[line[i] for i in used] for line in lines]


def print_study(
    study: PrecisionStudy, *, rows: int = 20, source: ModelSource | None = None
) -> None:
    """Print the verdict, the largest modules and the remarks."""
    console = Console()
    console.print(introduced(headline(study), source), soft_wrap=True)
    columns, lines = table(study)
    shown = Table(caption=NOTES)
    for name in columns:
        shown.add_column(name, overflow="fold", no_wrap=name != "module")
    for line in lines[:rows]:
        shown.add_row(*line)
    console.print(shown)
    if len(lines) > rows:
        console.print(f"… and {len(lines) - rows} smaller ones (--rows, --html)")
    below = [named(study, row.site) for row in study.rows[rows:] if row.keep]
    also = [f"also to keep in fp32: {', '.join(below)}"] if below else []
    for remark in also + remarks(study):
        console.print(f"- {remark}", soft_wrap=True, markup=False, highlight=False)
    if code := keep_code(study):
        console.print(f"\n{code}", soft_wrap=True, markup=False, highlight=False)


def write_study(
    study: PrecisionStudy, path: Path, *, source: ModelSource | None = None
) -> Path:
    """Write the study as one page that opens offline, and return where it is."""
    columns, lines = table(study)
    largest = max((row.share for row in study.rows), default=1.0)
    rows = [
        (line, row.share / largest, row.keep)
        for line, row in zip(lines, study.rows, strict=True)
    ]
    return _PAGE.write(
        path,
        headline=introduced(headline(study), source),
        remarks=remarks(study),
        columns=columns,
        rows=rows,
        notes=NOTES,
        code=keep_code(study),
    )


_PAGE = StudyPage(
    title="Precision",
    heading="Where the low-precision error comes from",
    style=""".bar { background: #3b7dd8; height: .6rem; border-radius: 2px;
       min-width: 1px }
td.bars { min-width: 8rem }
th { white-space: nowrap }
tr.keep { background: #f2a90022 }""",
    body="""<div class="wide" tabindex="0"><table><thead><tr>
{% for name in columns %}<th scope="col">{{ name }}</th>{% endfor %}
<th scope="col">share, of the largest</th></tr></thead><tbody>
{% for cells, length, keep in rows %}<tr{% if keep %} class="keep"{% endif %}>
{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}
<td class="bars"><div class="bar"
 style="width: {{ '%.2f' | format(100 * length) }}%"></div></td></tr>
{% endfor %}</tbody></table></div>
<p>{{ notes }}. Rows marked are those to keep in fp32. <b>mostly</b>: what of the module
contributes most, a parameter or the result of a call. <b>to zero</b>: the largest share
of a tensor stored there that the format makes zero.</p>
{% if code %}<h2>Apply it</h2>
<div class="wide" tabindex="0"><pre>{{ code }}</pre></div>{% endif %}
""",
)
