"""``equipoise precision MODEL``: what a narrow format does to a model, and where."""

from typing import Annotated

import typer

from equipoise.cli.arguments import BatchFile, Html, Model, RandomTokens, Rows, TextFile


def command(
    model: Model,
    *,
    batch: BatchFile = None,
    text: TextFile = None,
    random_tokens: RandomTokens = False,
    format: Annotated[
        str, typer.Option(help="bf16, fp16, tf32, e4m3, e5m2, or generic e5m10.")
    ] = "bf16",
    target: Annotated[
        float | None,
        typer.Option(min=0, help="Relative error to reach by keeping modules in fp32."),
    ] = None,
    scaled: Annotated[
        bool | None,
        typer.Option(help="Scale each tensor to fill the range; on for 8 bits."),
    ] = None,
    every_module: Annotated[
        bool, typer.Option(help="Also measure each module alone (slow).")
    ] = False,
    rows: Rows = 20,
    html: Html = None,
) -> None:
    """Predict and measure the error of a narrow format; say what to keep in fp32."""
    # Here, not above: --help must not load torch.
    from equipoise.auditing.precision.emulation import Storage
    from equipoise.auditing.precision.page import print_study, write_study
    from equipoise.auditing.precision.study import study
    from equipoise.cli.subject import checked_batch, subject

    # First what is cheap to refuse: weights may take minutes to load.
    storage = Storage.named(format, scaled=scaled)
    found = subject(model, batch, text=text, random_tokens=random_tokens)
    result = study(
        found.model,
        checked_batch(model, found),
        storage=storage,
        target=target,
        every_module=every_module,
    )
    print_study(result, rows=rows, source=found.source)
    if html is not None:
        typer.echo(f"wrote {write_study(result, html, source=found.source)}")
