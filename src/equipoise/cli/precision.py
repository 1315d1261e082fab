"""``equipoise precision MODEL``: what a narrow format does to a model, and where."""

from typing import Annotated

import typer

from equipoise.cli.arguments import (
    BatchFile,
    Html,
    Json,
    Model,
    RandomTokens,
    Rows,
    TextFile,
    print_json,
)
from equipoise.cli.progress import working

EXAMPLES = (
    "equipoise precision ./gpt2 --format fp16",
    "equipoise precision train.py:build --batch batch.pt --html page.html",
    "equipoise precision ./gpt2 --target 0.001 --json",
)


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
    json: Json = False,
) -> None:
    """Predict and measure the error of a narrow format; say what to keep in fp32."""
    # Here, not above: --help must not load torch.
    from equipoise.auditing.precision.emulation import Storage
    from equipoise.auditing.precision.page import headline, print_study, write_study
    from equipoise.auditing.precision.study import study
    from equipoise.cli.subject import checked_batch, subject

    # First what is cheap to refuse: weights may take minutes to load.
    storage = Storage.named(format, scaled=scaled)
    with working(f"opening {model}") as shown:
        found = subject(model, batch, text=text, random_tokens=random_tokens)
        given = checked_batch(model, found)
        shown.now(f"measuring {format} in {model}")
        result = study(
            found.model,
            given,
            storage=storage,
            target=target,
            every_module=every_module,
        )
    if json:
        print_json(result, source=found.source, headline=headline(result))
    else:
        print_study(result, rows=rows, source=found.source)
    if html is not None:
        typer.echo(f"wrote {write_study(result, html, source=found.source)}", err=json)
