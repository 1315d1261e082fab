"""``equipoise selection MODEL``: which heads select tokens, and which are flat."""

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
    "equipoise selection ./gpt2 --text corpus.txt",
    "equipoise selection train.py:build --batch batch.pt --json",
)


def command(
    model: Model,
    *,
    batch: BatchFile = None,
    text: TextFile = None,
    random_tokens: RandomTokens = False,
    tokens: Annotated[
        int,
        typer.Option(min=2, help="Length of a sequence of --text or --random-tokens."),
    ] = 256,
    queries: Annotated[
        int, typer.Option(min=1, help="Queries of each sequence to read.")
    ] = 64,
    top: Annotated[
        int, typer.Option(min=1, help="Tokens chosen for lift and recall.")
    ] = 16,
    rows: Rows = 40,
    html: Html = None,
    json: Json = False,
) -> None:
    """Say of every head whether it selects, rests on the first key, or is flat."""
    # Here, not above: --help must not load torch.
    from equipoise.auditing.selection.page import print_study, write_study
    from equipoise.auditing.selection.study import study
    from equipoise.cli.subject import checked_batch, subject

    with working(f"opening {model}") as shown:
        found = subject(
            model, batch, text=text, random_tokens=random_tokens, tokens=tokens
        )
        given = checked_batch(model, found)
        shown.now(f"reading the heads of {model}")
        result = study(found.model, given, queries=queries, top=top)
    if json:
        verdicts = [row.verdict for row in result.rows]
        print_json(result, source=found.source, counts=result.counts, verdicts=verdicts)
    else:
        print_study(result, rows=rows, source=found.source)
    if html is not None:
        typer.echo(f"wrote {write_study(result, html, source=found.source)}", err=json)
