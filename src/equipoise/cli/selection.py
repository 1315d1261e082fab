"""``equipoise selection MODEL``: which heads select tokens, and which are flat."""

from typing import Annotated

import typer

from equipoise.cli.arguments import BatchFile, Html, Model, Rows


def command(
    model: Model,
    *,
    batch: BatchFile = None,
    tokens: Annotated[
        int, typer.Option(min=2, help="Length, where the batch has to be made up.")
    ] = 256,
    queries: Annotated[
        int, typer.Option(min=1, help="Queries of each sequence to read.")
    ] = 64,
    top: Annotated[
        int, typer.Option(min=1, help="Tokens chosen for lift and recall.")
    ] = 16,
    rows: Rows = 40,
    html: Html = None,
) -> None:
    """Say of every head whether it selects, rests on the first key, or is flat."""
    # Here, not above: --help must not load torch.
    from equipoise.auditing.selection.page import print_study, write_study
    from equipoise.auditing.selection.study import study
    from equipoise.cli.subject import checked_batch, subject

    network, own_batch = subject(model, batch, tokens=tokens)
    given = checked_batch(model, network, own_batch)
    result = study(network, given, queries=queries, top=top)
    print_study(result, rows=rows)
    if html is not None:
        typer.echo(f"wrote {write_study(result, html)}")
