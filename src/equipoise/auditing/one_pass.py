"""One pass over a batch: everything ``watch`` reads, once, on a copy of the model."""

import copy
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.auditing.curvature.objective import calls, mean_loss
from equipoise.auditing.subject import output_of
from equipoise.errors import InputError
from equipoise.judging.judge import Judge
from equipoise.records import Finding, Reading
from equipoise.store import open_run
from equipoise.watching import watch


@contextmanager
def unlogged() -> Iterator[None]:
    """Log nothing of ours inside the block: the verdict comes first, and says it."""
    log = logging.getLogger("equipoise")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one pass over a batch gave."""

    readings: list[Reading]
    findings: list[Finding]
    notes: list[str]


def audit_batch(model: nn.Module, batch: Any) -> Point:
    """Return what ``watch`` reads in one pass over a batch, and what rules say of it.

    A copy is run, so that gradients and buffers of the model stay as they are.
    """
    twin, notes = copy.deepcopy(model), []
    with tempfile.TemporaryDirectory() as folder, unlogged():
        path = Path(folder) / "point.eqp"
        with watch(twin, run=path, every=1, quiet=True, preset="default") as handle:
            try:
                loss = _loss(twin, batch)
            except InputError as error:
                loss = None
                notes.append(f"no loss, so no gradients were read: {error}")
                with torch.no_grad():
                    output_of(twin, batch)
            if loss is not None:
                loss.backward()
            handle.step(loss=None if loss is None else loss.detach())
        news, _ = open_run(path).since(0)
    readings = list(news.readings)
    return Point(
        readings=readings,
        findings=[*news.findings, *Judge().add_at_once(readings)],
        notes=notes,
    )


def _loss(model: nn.Module, batch: Any) -> Tensor:
    parts = calls(model, batch)
    losses = [
        part.weight * mean_loss(model(*part.args, **part.kwargs), part.target)
        for part in parts
    ]
    return torch.stack(losses).sum()
