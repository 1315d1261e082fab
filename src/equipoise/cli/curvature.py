"""``equipoise curvature MODEL``: how sharp a loss is, and because of which part."""

import math
from pathlib import Path
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
from equipoise.errors import InputError

EXAMPLES = (
    "equipoise curvature ./gpt2 --text corpus.txt --lr 0.001",
    "equipoise curvature train.py:build --batch batch.pt --optimizer adam.pt",
    "equipoise curvature train.py:build --batch batch.pt --json",
)


def command(
    model: Model,
    *,
    batch: BatchFile = None,
    text: TextFile = None,
    random_tokens: RandomTokens = False,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate to judge; SGD unless --optimizer."),
    ] = None,
    momentum: Annotated[float, typer.Option(min=0, max=1, help="Of SGD.")] = 0.0,
    optimizer: Annotated[
        Path | None,
        typer.Option(help="state_dict() of an Adam over model.parameters(), a .pt."),
    ] = None,
    eigenvalues: Annotated[int, typer.Option(min=1, help="Largest ones to find.")] = 5,
    probes: Annotated[int, typer.Option(min=1, help="Random vectors.")] = 4,
    every_block: Annotated[
        bool, typer.Option(help="Also the sharpness of each sublayer alone (slow).")
    ] = False,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples at a time, to bound memory.")
    ] = None,
    rows: Rows = 40,
    html: Html = None,
    json: Json = False,
) -> None:
    """Say which sublayer makes a loss sharp, and if a learning rate is too large."""
    # Here, not above: --help must not load torch.
    from equipoise.auditing.curvature.page import headline, print_study, write_study
    from equipoise.auditing.curvature.study import study
    from equipoise.cli.subject import loss_batch, optimizer_for, subject

    if lr is not None and not 0 < lr < math.inf:
        raise InputError(f"--lr {lr}: a learning rate is positive")
    with working(f"opening {model}") as shown:
        found = subject(
            model, batch, text=text, random_tokens=random_tokens, targets=True
        )
        given = loss_batch(model, found)
        shown.now(f"measuring the curvature of {model}")
        result = study(
            found.model,
            given,
            optimizer=optimizer_for(found.model, optimizer, lr=lr, momentum=momentum),
            count=eigenvalues,
            probes=probes,
            every_block=every_block,
            micro_batch=micro_batch,
        )
    if json:
        print_json(result, source=found.source, headline=headline(result))
    else:
        print_study(result, rows=rows, source=found.source)
    if html is not None:
        typer.echo(f"wrote {write_study(result, html, source=found.source)}", err=json)
