"""One pass over a batch: everything ``watch`` reads, once, on a copy of the model."""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.anatomy.discovery import anatomy_of
from equipoise.auditing.curvature.objective import calls, mean_loss
from equipoise.auditing.subject import output_of
from equipoise.errors import InputError
from equipoise.judging.judge import Judge
from equipoise.records import Finding, Reading
from equipoise.watching.facts import fact_probes
from equipoise.watching.handle import Watch
from equipoise.watching.options import preset_probes, read_options
from equipoise.watching.ranks.group import SingleRank
from equipoise.watching.step.pipeline import StepWriter


class ReadingsInMemory(StepWriter):
    """Keeps the readings of a step where a run would write them."""

    def __init__(self) -> None:
        super().__init__()
        self.readings: list[Reading] = []

    def write(
        self, readings: Sequence[Reading], *_: object, **__: object
    ) -> list[Finding]:
        self.readings += readings
        return []


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
    twin, notes = copy.deepcopy(model), list[str]()
    kept = ReadingsInMemory()
    with unlogged(), _watched(twin, kept) as handle:
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
    return Point(
        readings=kept.readings,
        findings=[*handle.findings, *Judge().add_at_once(kept.readings)],
        notes=notes,
    )


def _watched(model: nn.Module, writer: StepWriter) -> Watch:
    return Watch(
        anatomy_of(model),
        [*preset_probes("default"), *fact_probes(())],
        writer,
        path=Path(),
        optimizers=(),
        options=read_options({"every": 1, "quiet": True, "sinks": ()}),
        ranks=SingleRank(),
        judge=Judge(),
    )


def _loss(model: nn.Module, batch: Any) -> Tensor:
    parts = calls(model, batch)
    losses = [
        part.weight * mean_loss(model(*part.args, **part.kwargs), part.target)
        for part in parts
    ]
    return torch.stack(losses).sum()
