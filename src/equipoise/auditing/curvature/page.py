"""A study of curvature on the screen, and as one offline page with two figures."""

import math
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from equipoise.auditing.curvature.study import CurvatureRow, CurvatureStudy
from equipoise.auditing.subject import ModelSource, introduced
from equipoise.numerics.spectra.density import Density
from equipoise.report.offline_pages import StudyPage
from equipoise.text.numbers import short

NOTES = (
    "shares of tr H, of λ₁ and of vᵀHv along the next step; each column is an exact "
    "sum over the directions it was taken along (random ones for tr H), and a share "
    "may be negative"
)
LOSS = "loss"
COLUMNS = ["sublayer", "of tr H", "of λ₁", "along the step"]
OWN = "own λ_max"
"""The column that only ``--every-block`` fills."""
PARTS = ("trace", "top", "update")
"""Of a row, in the order of the columns and of a study's totals."""
CANCEL = 3.0
"""Parts that add up to more than so many times the size of their sum."""
WIDTH, HEIGHT, POINTS = 720, 260, 240
LEFT, BELOW = 56, 40
"""Room for the labels of the axes."""


def percent(share: float) -> str:
    """Return a share in whole per cent; there is no −0 %.

    >>> percent(-0.001), percent(0.254), percent(-0.02), percent(float("nan"))
    ('0 %', '25 %', '-2 %', '–')
    """
    return f"{round(100 * share) + 0:d} %" if math.isfinite(share) else "–"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def headline(study: CurvatureStudy) -> str:
    """Return the verdict in a few sentences."""
    first = study.top[0]
    sentence = (
        f"{study.model}, {study.parameters} parameters: sharpness λ₁ "
        f"{short(first.value)} ± {short(first.residual)}, most negative curvature "
        f"{short(study.bottom.value)} ± {short(study.bottom.residual)}, trace "
        f"{short(study.trace.value)} ± {short(study.trace.residual)} (estimated), "
        f"gradient {short(study.gradient)}, curvature along the next step "
        f"{short(study.totals[2])}. "
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
        f"Of λ₁ {percent(outer / study.totals[1])} is the loss's own curvature "
        f"(Gauss–Newton); of the sublayers {worst.site} adds most, "
        f"{percent(worst.top / study.totals[1])}."
    )


def verdict(study: CurvatureStudy) -> str:
    """Return whether the step size is beyond what curvature allows, if one is known."""
    edge = study.edge
    if edge is None:
        most = 2 / study.top[0].value if study.top[0].value > 0 else float("inf")
        return f"Plain gradient descent is stable here up to lr {short(most)}."
    name = {
        "adam": "preconditioned sharpness",
        "sgd": "sharpness scaled by each group's learning rate,",
    }[edge.kind]
    name = "sharpness λ₁" if edge.value is study.top[0] else name
    beyond = "beyond" if edge.ratio > 1 else "within"
    return (
        f"At lr {short(edge.lr)} the {name} {short(edge.value.value)} is {beyond} what "
        f"{edge.kind} allows, {short(edge.threshold)} (ratio {short(edge.ratio)})."
    )


def columns(study: CurvatureStudy) -> list[str]:
    """Return the columns of the table; of what was not measured there is none."""
    return [*COLUMNS, *([OWN] if _owns(study) else ())]


def _owns(study: CurvatureStudy) -> bool:
    return any(row.sharpness is not None for row in study.rows)


def cells(study: CurvatureStudy, row: CurvatureRow) -> list[str]:
    """Return one line of the table: shares; each total is given once, above."""
    parts = zip((row.trace, row.top, row.update), study.totals, strict=True)
    # A sublayer without weights, such as the loss, has no block of its own.
    own = "–" if row.sharpness is None else short(row.sharpness)
    shares = [percent(_share(part, whole)) for part, whole in parts]
    name = row.site or "own operations of the model"
    return [name, *shares, *([own] if _owns(study) else ())]


def total(study: CurvatureStudy) -> list[str]:
    """Return the last line of the table."""
    sums = (percent(_share(t, t)) for t in study.totals)
    return ["total", *sums, *([""] if _owns(study) else ())]


def remarks(study: CurvatureStudy) -> list[str]:
    """Return what a reader must not overlook."""
    below, error = study.density.below(0.0)
    lines = [
        "largest eigenvalues: "
        + ", ".join(f"{short(e.value)} ± {short(e.residual)}" for e in study.top),
        f"share of negative eigenvalues: {below:.1%} ± {error:.1%}",
        "kinds of operation, of λ₁: "
        + ", ".join(
            f"{kind} {percent(_share(value[1], study.totals[1]))}"
            for kind, value in study.kinds.items()
        ),
        f"shares are exact sums: they miss their totals by {short(study.residual)} "
        "(relative)",
    ]
    lines += [
        f"the parts {name} cancel: their sizes add up to {sizes / abs(whole):.0f} "
        "times their sum, so that its shares say little"
        for name, part, whole in zip(COLUMNS[1:], PARTS, study.totals, strict=True)
        if (sizes := sum(abs(getattr(r, part)) for r in study.rows))
        > CANCEL * abs(whole)
        > 0
    ]
    unsettled = [e for e in (*study.top, study.bottom) if e.error > 0.05]
    if unsettled:
        lines.append(f"{len(unsettled)} eigenvalues are known to worse than 5 %")
    return lines


def print_study(
    study: CurvatureStudy, *, rows: int = 40, source: ModelSource | None = None
) -> None:
    """Print the verdict, the sublayers in their order, and the remarks."""
    console = Console()
    console.print(introduced(headline(study), source), soft_wrap=True, highlight=False)
    table = Table(caption=NOTES)
    for name in columns(study):
        table.add_column(name, overflow="fold", no_wrap=name != "sublayer")
    for row in study.rows[:rows]:
        table.add_row(*cells(study, row))
    table.add_section()
    table.add_row(*total(study))
    console.print(table)
    if len(study.rows) > rows:
        console.print(f"… and {len(study.rows) - rows} more (--rows, --html)")
    for line in remarks(study):
        console.print(f"- {line}", soft_wrap=True, highlight=False)


def write_study(
    study: CurvatureStudy, path: Path, *, source: ModelSource | None = None
) -> Path:
    """Write the study as one page that opens offline, and return where it is."""
    return _PAGE.write(
        path,
        headline=introduced(headline(study), source),
        remarks=remarks(study),
        columns=columns(study),
        rows=[(cells(study, row), bars(study, row)) for row in study.rows],
        total=total(study),
        notes=NOTES,
        spectrum=spectrum(study.density),
        size=(WIDTH, HEIGHT),
        room=(LEFT, BELOW),
    )


def bars(study: CurvatureStudy, row: CurvatureRow) -> list[tuple[float, float]]:
    """Return left edge and width, in %, of the bars around a zero in the middle.

    They are the shares that are printed: of a negative total, a negative part is one
    to the right.
    """
    found = []
    for index, name in enumerate(PARTS):
        whole = study.totals[index]
        shares = [_share(getattr(r, name), whole) for r in study.rows]
        largest = max((abs(x) for x in shares if math.isfinite(x)), default=0.0) or 1.0
        share = _share(getattr(row, name), whole)
        size = 50 * share / largest if math.isfinite(share) else 0.0
        found.append((50 + min(0.0, size), abs(size)))
    return found


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
        "across": _ticks(at[0], at[-1], WIDTH),
        "upwards": [
            (f"{HEIGHT - (k - floor) / ((top - floor) or 1.0) * HEIGHT:.1f}", k)
            for k in range(math.ceil(floor), math.floor(top) + 1)
        ],
    }


def _ticks(low: float, high: float, width: int) -> list[tuple[str, str]]:
    """Return place and label of about six round numbers of an axis."""
    step = 10.0 ** math.floor(math.log10((high - low) / 6))
    step *= next(k for k in (1, 2, 5, 10) if (high - low) / (k * step) <= 8)
    first = math.ceil(low / step)
    values = [step * k for k in range(first, math.floor(high / step) + 1)]
    return [(f"{(v - low) / (high - low) * width:.1f}", short(v + 0.0)) for v in values]


_PAGE = StudyPage(
    title="Curvature",
    heading="What makes the loss sharp",
    style=""".track { position: relative; height: .7rem; margin: 2px 0;
         background: linear-gradient(#8888, #8888) 50% / 1px 100% no-repeat #8881 }
.track div { position: absolute; top: 0; height: 100%; background: #3b7dd8 }
td:nth-child(3) .track div { background: #d8573b }
td:nth-child(4) .track div { background: #3ba55c }
td:nth-child(n+2):nth-child(-n+4) { min-width: 9rem }
svg { max-width: 100%; height: auto }
svg text { font: 12px system-ui, sans-serif; fill: currentColor }""",
    body="""<h2>Spectrum</h2>
<figure><svg viewBox="0 0 {{ size[0] + room[0] + 20 }} {{ size[1] + room[1] + 10 }}"
 width="{{ size[0] + room[0] + 20 }}" height="{{ size[1] + room[1] + 10 }}" role="img"
 aria-label="density of eigenvalues over λ">
<g transform="translate({{ room[0] }} 10)">
<rect width="{{ size[0] }}" height="{{ size[1] }}" fill="none" stroke="#8886"/>
{% for x, label in spectrum.across %}<line x1="{{ x }}" x2="{{ x }}" y1="{{ size[1] }}"
 y2="{{ size[1] + 5 }}" stroke="currentColor"/><text x="{{ x }}" y="{{ size[1] + 18 }}"
 text-anchor="middle">{{ label }}</text>{% endfor %}
<text x="{{ size[0] / 2 }}" y="{{ size[1] + 35 }}" text-anchor="middle">eigenvalue λ
</text>
{% for y, power in spectrum.upwards %}<line x1="-5" x2="0" y1="{{ y }}" y2="{{ y }}"
 stroke="currentColor"/><text x="-8" y="{{ y }}" text-anchor="end"
 dominant-baseline="middle">10<tspan dy="-5" font-size="9">{{ power }}</tspan></text>
{% endfor %}
<line x1="{{ spectrum.zero }}" x2="{{ spectrum.zero }}" y1="0" y2="{{ size[1] }}"
 stroke="#8888" stroke-dasharray="4"/>
<polyline points="{{ spectrum.points }}" fill="none" stroke="#3b7dd8" stroke-width="2"/>
</g></svg><figcaption>Eigenvalues per unit of λ; zero is dashed.</figcaption></figure>
<h2>Attribution</h2>
<div class="wide" tabindex="0"><table><thead><tr>
{% for name in columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for cells, bars in rows %}<tr>
{% for cell in cells %}<td>{{ cell }}{% if 1 <= loop.index0 <= 3 %}<div class="track">
<div style="left: {{ '%.2f' | format(bars[loop.index0 - 1][0]) }}%; width:
 {{ '%.2f' | format(bars[loop.index0 - 1][1]) }}%"></div></div>{% endif %}</td>
{% endfor %}</tr>
{% endfor %}</tbody><tfoot><tr>{% for cell in total %}<td>{{ cell }}</td>{% endfor %}
</tr></tfoot></table></div>
<p>{{ notes }}. Bars: zero in the middle, each column on its own scale.</p>
""",
)
