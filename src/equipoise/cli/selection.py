"""``equipoise selection MODEL``: which heads select tokens, and which are flat."""

from typing import Annotated

import typer

from equipoise.cli.study import StudyArgs, StudyOutput, studies

EXAMPLES = (
    "equipoise selection ./gpt2 --text corpus.txt",
    "equipoise selection train.py:build --batch batch.pt --json",
)


@studies(rows=40)
def command(
    typed: StudyArgs,
    *,
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
) -> StudyOutput:
    """Tell heads that select tokens from heads that rest on one key, or are flat."""
    # Here, not above: --help must not load torch.
    from equipoise.auditing.selection import page
    from equipoise.auditing.selection.study import study
    from equipoise.cli.subject import checked_batch

    found = typed.opened("reading the heads of", tokens=tokens)
    batch = checked_batch(typed.model, found)
    result = study(found.model, batch, queries=queries, top=top)
    more = {"counts": result.counts, "verdicts": [row.verdict for row in result.rows]}
    return StudyOutput(result=result, source=found.source, page=page, more=more)
