"""``equipoise plan``: what to set before training, and why."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from equipoise.planning import (
    ATTENTIONS,
    NORMS,
    PRECISIONS,
    RESIDUALS,
    WARMUPS,
    Plan,
    plan,
)


def command(
    depth: Annotated[int, typer.Argument(help="Layers (of the encoder, if two).")],
    width: Annotated[int, typer.Argument(help="Width d of the residual stream.")],
    heads: Annotated[int, typer.Argument(help="Attention heads.")],
    *,
    residual: Annotated[str, typer.Option(help=" · ".join(RESIDUALS))] = "pre",
    attention: Annotated[str, typer.Option(help=" · ".join(ATTENTIONS))] = "standard",
    norm: Annotated[str, typer.Option(help=" · ".join(NORMS))] = "layernorm",
    precision: Annotated[
        str,
        typer.Option(help=f"Format the norms compute in: {' · '.join(PRECISIONS)}"),
    ] = "bf16",
    warmup: Annotated[str, typer.Option(help=" · ".join(WARMUPS))] = "learning-rate",
    beta2: Annotated[float, typer.Option(help="Adam's β₂.")] = 0.95,
    decoder_depth: Annotated[
        int | None, typer.Option(help="Layers of the decoder, if there are two stacks.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Recommend gains, residual multipliers, warm-up and ε, each with its reference."""
    # Every option but --json is one of plan's, under the same name.
    given = {name: value for name, value in locals().items() if name != "json"}
    found = plan(**given)
    if json:
        typer.echo(found.to_json())
    else:
        print_plan(found)


def print_plan(found: Plan, console: Console | None = None) -> None:
    """Print a plan as a table; notes stand under it, numbered."""
    table = Table("set", "to", "formula", "reference", box=None, header_style="bold")
    notes: dict[str, int] = {}
    for setting in found:
        mark = ""
        if setting.note:
            mark = f" [{notes.setdefault(setting.note, len(notes) + 1)}]"
        value = f"{setting.value:.6g}"
        table.add_row(
            setting.name, value, setting.formula, setting.reference + mark, style=None
        )
    console = console or Console()
    console.print(table, markup=False, highlight=False)
    for note, number in notes.items():
        console.print(f"[{number}] {note}", markup=False, highlight=False)
