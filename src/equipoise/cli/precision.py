"""``equipoise precision MODEL``: what a narrow format does to a model, and where."""

from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from equipoise.errors import InputError
from equipoise.lab.reopening import is_ours, reopened
from equipoise.precision.batch import Batch
from equipoise.precision.emulation import Storage
from equipoise.precision.loading import FORMS, loaded, loaded_batch
from equipoise.precision.page import print_study, write_study
from equipoise.precision.study import study


def command(
    model: Annotated[str, typer.Argument(help=f"The model: {FORMS}.")],
    *,
    batch: Annotated[
        Path | None,
        typer.Option(help="Inputs: .pt, .safetensors or .json, name → tensor."),
    ] = None,
    format: Annotated[
        str, typer.Option(help="bf16, fp16, tf32, e4m3, e5m2, or generic e5m10.")
    ] = "bf16",
    target: Annotated[
        float | None,
        typer.Option(help="Relative error to reach by keeping modules in fp32."),
    ] = None,
    scaled: Annotated[
        bool | None,
        typer.Option(help="Scale each tensor to fill the range; on for 8 bits."),
    ] = None,
    every_module: Annotated[
        bool, typer.Option(help="Also measure each module alone (slow).")
    ] = False,
    rows: Annotated[int, typer.Option(help="Modules to show.")] = 20,
    html: Annotated[Path | None, typer.Option(help="Write one offline page.")] = None,
) -> None:
    """Predict and measure a model's error in a narrow format; say what to keep wide."""
    # First what is cheap to refuse: weights may take minutes to load.
    storage = Storage.named(format, scaled=scaled)
    own_file = loaded_batch(batch) if batch is not None else None
    found, own_batch = _found(model)
    given = own_batch if own_file is None else own_file
    if given is None:
        raise InputError(f"{model} came without a batch: give one with --batch")
    result = study(
        found,
        given,
        storage=storage,
        target=target,
        every_module=every_module,
    )
    print_study(result, rows=rows)
    if html is not None:
        typer.echo(f"wrote {write_study(result, html)}")


def _found(model: str) -> tuple[nn.Module, Batch | None]:
    if is_ours(Path(model)):
        trained, (inputs, _) = reopened(Path(model))
        return trained, inputs
    return loaded(model)
