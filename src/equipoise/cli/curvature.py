"""``equipoise curvature MODEL``: how sharp a loss is, and because of which part."""

import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from equipoise.auditing.curvature.objective import calls, mean_loss
from equipoise.auditing.curvature.page import print_study, write_study
from equipoise.auditing.curvature.study import study
from equipoise.auditing.subject import UNPICKLING
from equipoise.cli.subject import (
    BatchFile,
    Html,
    Model,
    Rows,
    in_one_line,
    somebodys_code,
    subject,
)
from equipoise.errors import InputError
from equipoise.lab.data import embedded

SHAPE = (4, 32)
"""Sequences and tokens of the batch that is made when none is given."""


def command(
    model: Model,
    *,
    batch: BatchFile = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Step size to judge; SGD unless --optimizer."),
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
) -> None:
    """Say which sublayer makes a loss sharp, and whether a step size is too large."""
    if lr is not None and not 0 < lr < math.inf:
        raise InputError(f"--lr {lr}: a step size is positive")
    found, own_batch = subject(model, batch, targets=True)
    given = _tried(model, found, own_batch)
    result = study(
        found,
        given,
        optimizer=_optimizer(found, lr, momentum, optimizer),
        count=eigenvalues,
        probes=probes,
        every_block=every_block,
        micro_batch=micro_batch,
    )
    print_study(result, rows=rows)
    if html is not None:
        typer.echo(f"wrote {write_study(result, html)}")


def _tried(spec: str, model: nn.Module, batch: Any) -> Any:
    """Return a batch of which the model has a loss; one is made up if there is none."""
    given = _made(model, spec) if batch is None else batch
    with somebodys_code(f"{spec} has no loss on this batch"), torch.no_grad():
        for part in calls(model, given):
            mean_loss(model(*part.args, **part.kwargs), part.target)
    return given


def _made(model: nn.Module, spec: str) -> torch.Tensor:
    """Return text of the embedded corpus as tokens, for a model that reads tokens."""
    words = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not words:
        raise InputError(f"{spec} came without a batch: give one with --batch")
    B, T = SHAPE
    bytes_ = torch.from_numpy(embedded().tokens[: B * T].astype("int64"))
    return bytes_.view(B, T) % max(words)


def _optimizer(
    model: nn.Module, lr: float | None, momentum: float, state: Path | None
) -> Optimizer | None:
    if state is None:
        if lr is None:
            return None
        return SGD(model.parameters(), lr=lr, momentum=momentum)
    if not state.is_file():
        raise InputError(f"{state}: no such file")
    adam = AdamW([p for p in model.parameters() if p.requires_grad])
    try:
        adam.load_state_dict(torch.load(state, weights_only=True))
    except UNPICKLING as error:
        raise InputError(
            f"{state} is not the state of one group of this model's parameters "
            f"({in_one_line(error)}); in Python, "
            "equipoise.auditing.curvature.edge_of_stability takes any"
        ) from error
    for group in adam.param_groups:
        group["lr"] = group["lr"] if lr is None else lr
    return adam
