"""``equipoise selection MODEL``: which heads select, and which have gone flat."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.errors import InputError
from equipoise.precision.loading import FORMS, loaded, loaded_batch
from equipoise.selection.page import print_study
from equipoise.selection.study import study


def command(
    model: Annotated[str, typer.Argument(help=f"The model: {FORMS}.")],
    *,
    batch: Annotated[
        Path | None,
        typer.Option(help="Inputs: .pt, .safetensors or .json, name → tensor."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Length, where the batch has to be made up.")
    ] = 256,
    queries: Annotated[
        int, typer.Option(help="Queries of each sequence to read.")
    ] = 64,
    top: Annotated[int, typer.Option(help="Tokens chosen for lift and recall.")] = 16,
    rows: Annotated[int, typer.Option(help="Heads to show, the flattest first.")] = 40,
) -> None:
    """Say of every head whether it selects, rests on the first key, or is flat."""
    found, own_batch = loaded(model, tokens=tokens)
    given = loaded_batch(batch) if batch is not None else own_batch
    if given is None:
        raise InputError(f"{model} came without a batch: give one with --batch")
    print_study(study(found, given, queries=queries, top=top), rows=rows)
