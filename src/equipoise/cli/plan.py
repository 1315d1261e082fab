"""``equipoise plan``: what to set before training, and why."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from equipoise.cli.arguments import Json, put_json, with_options
from equipoise.errors import InputError
from equipoise.planning import (
    CHOICES,
    Model,
    Plan,
    plan,
)
from equipoise.planning.config import options_of
from equipoise.planning.evidence import PUBLISHED, SOURCES, authors_of

EXAMPLES = (
    "equipoise plan ./gpt2",
    "equipoise plan --depth 36 --width 1280 --heads 20 --residual deepnorm",
    "equipoise plan 36 1280 20 --precision fp16 --json",
)
SIZES = ("depth", "width", "heads")
DEFAULTS = {field.name: field.default for field in fields(Model)}
PREFIXES = {"precision": "Format the norms compute in: "}
OPTIONS = {
    "depth": (int, "Layers (of the encoder, if two stacks)."),
    "width": (int, "Width of the residual stream."),
    "heads": (int, "Attention heads."),
    **{
        name: (str, f"{PREFIXES.get(name, '')}{' · '.join(known)} ({DEFAULTS[name]})")
        for name, known in CHOICES.items()
    },
    "beta2": (float, f"Adam's β₂ ({DEFAULTS['beta2']})."),
    "decoder_depth": (int, "Layers of the decoder, if there are two stacks."),
}


@with_options(OPTIONS, before="beside")
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
    beside: Annotated[
        str | None,
        typer.Option(help=f"Also print the published recipe: {' · '.join(PUBLISHED)}"),
    ] = None,
    json: Json = None,
    **given: Any,
) -> None:
    """Recommend gains, residual multipliers, warm-up and ε, each with its reference.

    What a model's config.json says is taken from there; an option goes before it.
    """
    found = plan(**_complete({**_sizes(model or []), **given}))
    if json is None or not put_json(found.to_json(), json):
        print_plan(found, beside=beside)


def _sizes(words: list[str]) -> dict[str, Any]:
    """Parse the positional arguments: a model, or its three sizes."""
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
    if beside is not None:
        console.print(f"{beside}: {SOURCES[beside]}", markup=False, highlight=False)
