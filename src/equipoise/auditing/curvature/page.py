"""A study of curvature on the screen, and as one offline page with two figures."""

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from equipoise.auditing.curvature.study import CurvatureRow, CurvatureStudy
from equipoise.auditing.subject import Source, introduced
from equipoise.numerics.spectra.density import Density
from equipoise.report.pages import StudyPage
from equipoise.report.views import short

NOTES = (
    "parts of tr H, of λ₁ and of vᵀHv along the next step; each column sums to its "
    "total, and a part may be negative"
)
LOSS = "loss"
COLUMNS = ["sublayer", "of tr H", "of λ₁", "along the step", "own λ_max"]
WIDTH, HEIGHT, POINTS = 720, 260, 240


def headline(study: CurvatureStudy) -> str:
    """Return the verdict in a few sentences."""
    first = study.top[0]
    sentence = (
        f"{study.model}, {study.parameters} parameters: sharpness "
        f"{short(first.value)} ± {short(first.residual)}, most negative curvature "
        f"{short(study.bottom.value)}, trace {short(study.trace.value)} ± "
        f"{short(study.trace.residual)}, gradient {short(study.gradient)}. "
        f"{_largest(study)}"
    )
    return f"{sentence} {verdict(study)}".strip()


def _largest(study: CurvatureStudy) -> str:
    inner = [row for row in study.rows if row.site != LOSS]
    outer = sum(row.top for row in study.rows if row.site == LOSS)
    if not inner or not study.totals[1]:
        return ""
    worst = max(inner, key=lambda row: row.top)
    return (
        f"Of the sharpest direction {outer / study.totals[1]:.0%} is the loss's own "
        f"curvature (Gauss–Newton); of the sublayers {worst.site} adds most, "
        f"{worst.top / study.totals[1]:.0%}."
    )


def verdict(study: CurvatureStudy) -> str:
    """Return whether the step size is beyond what curvature allows, if one is known."""
    edge = study.edge
    if edge is None:
        most = 2 / study.top[0].value if study.top[0].value > 0 else float("inf")
        return f"Plain gradient descent is stable here up to lr {short(most)}."
    name = {"adam": "preconditioned sharpness", "sgd": "sharpness"}[edge.kind]
    beyond = "beyond" if edge.ratio > 1 else "within"
    return (
        f"At lr {short(edge.lr)} the {name} {short(edge.value.value)} is {beyond} what "
        f"{edge.kind} allows, {short(edge.threshold)} (ratio {short(edge.ratio)})."
    )


def cells(row: CurvatureRow) -> list[str]:
    """Return one line of the table; values, because a total may be near zero."""
    parts = [short(part) for part in (row.trace, row.top, row.update)]
    own = "" if row.sharpness is None else short(row.sharpness)
    return [row.site or "(the model itself)", *parts, own]


def total(study: CurvatureStudy) -> list[str]:
    """Return the last line of the table."""
    return ["total", *(short(value) for value in study.totals), ""]


def remarks(study: CurvatureStudy) -> list[str]:
    """Return what a reader must not overlook."""
    below, error = study.density.below(0.0)
    lines = [
        "largest eigenvalues: "
        + ", ".join(f"{short(e.value)} ± {short(e.residual)}" for e in study.top),
        f"share of negative eigenvalues: {below:.1%} ± {error:.1%}",
        "kinds of operation, of λ₁: "
        + ", ".join(
            f"{kind} {value[1] / study.totals[1]:.0%}"
            for kind, value in study.kinds.items()
            if study.totals[1]
        ),
        f"parts miss their total by {short(study.residual)} (relative)",
    ]
    unsettled = [e for e in (*study.top, study.bottom) if e.error > 0.05]
    if unsettled:
        lines.append(f"{len(unsettled)} eigenvalues are known to worse than 5 %")
    return lines


def print_study(
    study: CurvatureStudy, *, rows: int = 40, source: Source | None = None
) -> None:
    """Print the verdict, the sublayers in their order, and the remarks."""
    console = Console()
    console.print(introduced(headline(study), source), soft_wrap=True, highlight=False)
    table = Table(caption=NOTES)
    for name in COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name != "sublayer")
    for row in study.rows[:rows]:
        table.add_row(*cells(row))
    table.add_section()
    table.add_row(*total(study))
    console.print(table)
    if len(study.rows) > rows:
        console.print(f"… and {len(study.rows) - rows} more (--rows, --html)")
    for line in remarks(study):
        console.print(f"- {line}", soft_wrap=True, highlight=False)


def write_study(
    study: CurvatureStudy, path: Path, *, source: Source | None = None
) -> Path:
    """Write the study as one page that opens offline, and return where it is."""
    return _PAGE.write(
        path,
        headline=introduced(headline(study), source),
        remarks=remarks(study),
        columns=COLUMNS,
        rows=[(cells(row), bars(study, row)) for row in study.rows],
        total=total(study),
        notes=NOTES,
        spectrum=spectrum(study.density),
        size=(WIDTH, HEIGHT),
    )


def bars(study: CurvatureStudy, row: CurvatureRow) -> list[tuple[float, float]]:
    """Return left edge and width, in %, of the bars around a zero in the middle."""
    largest = [
        max(abs(getattr(r, name)) for r in study.rows) or 1.0
        for name in ("trace", "top", "update")
    ]
    sizes = [
        50 * part / most
        for part, most in zip((row.trace, row.top, row.update), largest, strict=True)
    ]
    return [(50 + min(0.0, size), abs(size)) for size in sizes]


def spectrum(density: Density) -> dict[str, object]:
    """Return the density's curve as points of a picture, log₁₀ upwards."""
    nodes = np.concatenate(density.nodes)
    low, high = float(nodes.min()), float(nodes.max())
    margin = 0.05 * (high - low) or 1.0
    at = np.linspace(low - margin, high + margin, POINTS)
    curve = density.curve(at, bandwidth=(high - low + 1e-12) / 60)
    level = np.log10(np.maximum(curve * density.width, 1e-3))
    top, floor = float(level.max()), float(level.min())
    x = (at - at[0]) / (at[-1] - at[0]) * WIDTH
    y = HEIGHT - (level - floor) / ((top - floor) or 1.0) * HEIGHT
    zero = (0 - at[0]) / (at[-1] - at[0]) * WIDTH
    return {
        "points": " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True)),
        "zero": f"{zero:.1f}",
        "ends": (short(low), short(high)),
        "levels": (f"10^{floor:.1f}", f"10^{top:.1f}"),
    }


_PAGE = StudyPage(
    title="Curvature",
    heading="What makes the loss sharp",
    style=""".track { position: relative; height: .5rem; border-left: 1px solid #8888;
         border-right: 1px solid #8888; margin: 2px 0 }
.track div { position: absolute; top: 0; height: 100%; background: #3b7dd8 }
.track:nth-child(2) div { background: #d8573b }
.track:nth-child(3) div { background: #3ba55c }
svg { max-width: 100%; height: auto; border: 1px solid #8884 }
.key span { padding: 0 .4rem; color: #fff; border-radius: 2px }""",
    body="""<h2>Spectrum</h2>
<figure><svg viewBox="0 0 {{ size[0] }} {{ size[1] }}" width="{{ size[0] }}"
 height="{{ size[1] }}" role="img" aria-label="density of eigenvalues">
<line x1="{{ spectrum.zero }}" x2="{{ spectrum.zero }}" y1="0" y2="{{ size[1] }}"
 stroke="#8888" stroke-dasharray="4"/>
<polyline points="{{ spectrum.points }}" fill="none" stroke="#3b7dd8" stroke-width="2"/>
</svg><figcaption>Eigenvalues per unit of λ, logarithmic from
{{ spectrum.levels[0] }} to {{ spectrum.levels[1] }}; λ from {{ spectrum.ends[0] }} to
{{ spectrum.ends[1] }}, zero dashed.</figcaption></figure>
<h2>Attribution</h2>
<p class="key"><span style="background:#3b7dd8">trace</span>
<span style="background:#d8573b">λ₁</span>
<span style="background:#3ba55c">next step</span>; zero in the middle.</p>
<div class="wide"><table><thead><tr>
{% for name in columns %}<th scope="col">{{ name }}</th>{% endfor %}
<th scope="col" style="width:30%">parts</th></tr></thead><tbody>
{% for cells, bars in rows %}<tr>
{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}
<td>{% for left, width in bars %}<div class="track"><div style="left:
{{ '%.2f' | format(left) }}%; width: {{ '%.2f' | format(width) }}%"></div></div>
{% endfor %}</td></tr>
{% endfor %}</tbody><tfoot><tr>{% for cell in total %}<td>{{ cell }}</td>{% endfor %}
<td></td></tr></tfoot></table></div>
<p>{{ notes }}.</p>
""",
)
