"""A study of selection on the screen."""

import math

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from equipoise.report.table import short
from equipoise.selection.study import Row, Study

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


def headline(study: Study) -> str:
    """Return the verdict in two sentences."""
    counts = ", ".join(f"{n} {SAYS[kind]}" for kind, n in study.counts.items())
    widest = max((r.rho for r in study.rows if not math.isnan(r.rho)), default=math.nan)
    return (
        f"{study.model}, up to {study.keys} keys: of {len(study.rows)} heads {counts}. "
        f"One key needs a range of {short(study.needed)} between logits to hold half "
        f"of the mass; the widest head has {short(widest)}."
    )


def cells(row: Row) -> list[str]:
    """Return one line of the table; what could not be read is empty."""
    numbers = (row.evenness, row.growth, row.sink, row.rho, row.lift)
    shown = ["" if math.isnan(n) else f"{n:.2g}" for n in numbers]
    recalls = (row.recall, row.recall_random)
    shares = ["" if math.isnan(n) else f"{n:.0%}" for n in recalls]
    return [row.site, str(row.head), row.verdict, *shown, *shares]


def print_study(study: Study, *, rows: int = 40) -> None:
    """Print the verdict and the flattest heads."""
    console = Console()
    console.print(headline(study), soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name != "layer")
    worst = sorted(study.rows, key=lambda r: -_order(r))
    for row in worst[:rows]:
        table.add_row(*cells(row))
    console.print(table)
    console.print(f"{NOTES} · {study.chosen} chosen", style="dim")
    if len(worst) > rows:
        console.print(f"… and {len(worst) - rows} heads that are less even (--rows)")


def _order(row: Row) -> float:
    return -math.inf if math.isnan(row.evenness) else row.evenness
