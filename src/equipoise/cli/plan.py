"""``equipoise plan``: what to set before training, and why."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from equipoise.cli.arguments import Json
from equipoise.errors import InputError
from equipoise.planning import (
    ATTENTIONS,
    FEEDFORWARDS,
    NORMS,
    PRECISIONS,
    RESIDUALS,
    WARMUPS,
    Plan,
    plan,
)
from equipoise.planning.config import options_of
from equipoise.planning.evidence import PUBLISHED, authors_of

EXAMPLES = (
    "equipoise plan ./gpt2",
    "equipoise plan --depth 36 --width 1280 --heads 20 --residual deepnorm",
    "equipoise plan 36 1280 20 --precision fp16 --json",
)
SIZES = ("depth", "width", "heads")


def command(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL | DEPTH WIDTH HEADS]",
            help="A Hugging Face model directory or its config.json; or three numbers.",
            show_default=False,
        ),
    ] = None,
    *,
    depth: Annotated[
        int | None, typer.Option(help="Layers (of the encoder, if two stacks).")
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Width of the residual stream.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    residual: Annotated[
        str | None, typer.Option(help=f"{' · '.join(RESIDUALS)} (pre)")
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help=f"{' · '.join(ATTENTIONS)} (standard)")
    ] = None,
    norm: Annotated[
        str | None, typer.Option(help=f"{' · '.join(NORMS)} (layernorm)")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help=f"Format the norms compute in: {' · '.join(PRECISIONS)} (bf16)"
        ),
    ] = None,
    warmup: Annotated[
        str | None, typer.Option(help=f"{' · '.join(WARMUPS)} (learning-rate)")
    ] = None,
    beta2: Annotated[float | None, typer.Option(help="Adam's β₂ (0.95).")] = None,
    decoder_depth: Annotated[
        int | None, typer.Option(help="Layers of the decoder, if there are two stacks.")
    ] = None,
    feedforward: Annotated[
        str | None, typer.Option(help=f"{' · '.join(FEEDFORWARDS)} (plain)")
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(help=f"Also what its authors did: {' · '.join(PUBLISHED)}"),
    ] = None,
    json: Json = False,
) -> None:
    """Recommend gains, residual multipliers, warm-up and ε, each with its reference.

    What a model's config.json says is taken from there; an option goes before it.
    """
    # Every option but these is one of plan's, under the same name.
    named = {k: v for k, v in locals().items() if k not in ("model", "json", "beside")}
    given = {name: value for name, value in named.items() if value is not None}
    found = plan(**_complete({**_sizes(model or []), **given}))
    if json:
        typer.echo(found.to_json())
    else:
        print_plan(found, beside=beside)


def _sizes(words: list[str]) -> dict[str, Any]:
    """Return what was typed without a name: a model, or its three sizes."""
    if len(words) == len(SIZES) and all(word.isdigit() for word in words):
        return dict(zip(SIZES, map(int, words), strict=True))
    if len(words) > 1:
        raise InputError("plan takes a model, or DEPTH WIDTH HEADS as three numbers")
    return options_of(Path(words[0])) if words else {}


def _complete(given: dict[str, Any]) -> dict[str, Any]:
    missing = [f"--{name}" for name in SIZES if name not in given]
    if missing:
        raise InputError(f"{', '.join(missing)}: give a model, or its sizes by name")
    return given


def print_plan(
    found: Plan, console: Console | None = None, *, beside: str | None = None
) -> None:
    """Print a plan as a table; notes and evidence stand under it, numbered.

    ``beside`` adds a column with what the authors of a known model did.
    """
    authors = {} if beside is None else authors_of(beside)
    columns = ["set", "to", "formula", "reference", "evidence"]
    table = Table(
        *columns, *([beside] if beside else []), box=None, header_style="bold"
    )
    notes: dict[str, int] = {}

    def mark(note: str) -> str:
        return f" [{notes.setdefault(note, len(notes) + 1)}]" if note else ""

    for setting in found:
        theirs = authors.get(setting.name, "")
        table.add_row(
            setting.name,
            f"{setting.value:.6g}",
            setting.formula,
            setting.reference + mark(setting.note),
            setting.evidence + mark(setting.because),
            *(
                [theirs if isinstance(theirs, str) else f"{theirs:.6g}"]
                if beside
                else []
            ),
        )
    console = console or Console()
    console.print(table, markup=False, highlight=False)
    for note, number in notes.items():
        console.print(f"[{number}] {note}", markup=False, highlight=False)
