"""``equipoise precision MODEL``: what a narrow format does to a model, and where."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.errors import InputError
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
    found, own_batch = loaded(model)
    given = loaded_batch(batch) if batch is not None else own_batch
    if given is None:
        raise InputError(f"{model} came without a batch: give one with --batch")
    result = study(
        found,
        given,
        storage=Storage.named(format, scaled=scaled),
        target=target,
        every_module=every_module,
    )
    print_study(result, rows=rows)
    if html is not None:
        typer.echo(f"wrote {write_study(result, html)}")
