"""``equipoise curvature MODEL``: how sharp a loss is, and because of which part."""

import math
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.study import StudyArgs, StudyOutput, studies
from equipoise.errors import InputError

EXAMPLES = (
    "equipoise curvature ./gpt2 --text corpus.txt --lr 0.001",
    "equipoise curvature train.py:build --batch batch.pt --optimizer adam.pt",
    "equipoise curvature train.py:build --batch batch.pt --json",
)


@studies(rows=40)
def command(
    typed: StudyArgs,
    *,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate to judge, for SGD unless --optimizer is given."
        ),
    ] = None,
    momentum: Annotated[
        float, typer.Option(min=0, max=1, help="Momentum of SGD.")
    ] = 0.0,
    optimizer: Annotated[
        Path | None,
        typer.Option(help="state_dict() of an Adam over model.parameters(), a .pt."),
    ] = None,
    eigenvalues: Annotated[
        int, typer.Option(min=1, help="Number of largest eigenvalues to find.")
    ] = 5,
    probes: Annotated[
        int,
        typer.Option(min=1, help="Number of random vectors, for density and trace."),
    ] = 4,
    every_block: Annotated[
        bool,
        typer.Option(help="Also measure the sharpness of each sublayer alone (slow)."),
    ] = False,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples at a time, to bound memory.")
    ] = None,
) -> StudyOutput:
    """Find the sublayer that makes a loss sharp; judge a learning rate."""
    if lr is not None and not 0 < lr < math.inf:
        raise InputError(f"--lr {lr}: a learning rate is positive")
    if optimizer is not None and not optimizer.is_file():
        raise InputError(f"--optimizer {optimizer}: no such file")
    # Here, not above: --help must not load torch.
    from equipoise.auditing.curvature import page
    from equipoise.auditing.curvature.study import study
    from equipoise.cli.subject import loss_batch, optimizer_for

    found = typed.opened("measuring the curvature of", targets=True)
    result = study(
        found.model,
        loss_batch(typed.model, found),
        optimizer=optimizer_for(found.model, optimizer, lr=lr, momentum=momentum),
        count=eigenvalues,
        probes=probes,
        every_block=every_block,
        micro_batch=micro_batch,
    )
    more = {"headline": page.headline(result)}
    return StudyOutput(result=result, source=found.source, page=page, more=more)
