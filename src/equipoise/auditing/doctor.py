"""Devices and kernels; of a model what can be read at which cost, found by trying it.

A few training steps are made on the batch at learning rate 0, every second one sampled.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from equipoise.anatomy.discovery import anatomy_of
from equipoise.auditing.subject import Batch, output_of
from equipoise.numerics.compiled import COMPILED, cache_folder
from equipoise.records import Finding
from equipoise.store import open_run
from equipoise.watching import watch

PAIRS = 3
"""Sampled and other steps that are compared, after one of each to warm up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """What watching this model would read, and at which cost."""

    model: str
    family: str
    parameters: int
    blocks: int
    attention: int
    """Attention sites found before the first forward pass."""
    without_projections: tuple[str, ...]
    """Attention sites whose W_Q, W_K, W_V and W_O are not known: no G, no S."""
    quantities: tuple[str, ...]
    """What was read."""
    findings: tuple[Finding, ...]
    """What was not, and why."""
    step_seconds: float
    """CPU seconds of a step that is not sampled."""
    sampled_seconds: float

    @property
    def ratio(self) -> float:
        """How many plain steps a sampled one takes."""
        return self.sampled_seconds / self.step_seconds

    def share(self, every: int) -> float:
        """Return the cost of sampling one step in ``every``, of the whole training."""
        return (self.ratio - 1) / every


def check_model(model: nn.Module, batch: Batch) -> ModelCheck:
    """Train a few steps at learning rate 0, watched; return what came of it."""
    anatomy = anatomy_of(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "doctor.eqp"
        times, findings = _watched_steps(model, batch, path)
        quantities = tuple(open_run(path).quantities)
    sampled, plain = times[2::2], times[3::2]
    return ModelCheck(
        model=type(model).__name__,
        family=anatomy.family,
        parameters=sum(p.numel() for p in model.parameters()),
        blocks=len(anatomy.blocks),
        attention=len(anatomy.attention),
        without_projections=tuple(
            site.name for site in anatomy.attention if site.projections is None
        ),
        quantities=quantities,
        findings=findings,
        step_seconds=statistics.median(plain),
        sampled_seconds=statistics.median(sampled),
    )


def _watched_steps(
    model: nn.Module, batch: Batch, path: Path
) -> tuple[list[float], tuple[Finding, ...]]:
    """Return the CPU seconds of each step, and the findings."""
    model.train()
    optimizer = AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    times = []
    with watch(
        model, optimizer, run=path, every=2, dense_start=False, quiet=True
    ) as handle:
        for _ in range(2 + 2 * PAIRS):
            start = time.process_time()
            output_of(model, batch).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.process_time() - start)
    return times, handle.findings


def torch_machine() -> dict[str, Any]:
    """Return the devices and threads of torch, and whether kernels are compiled."""
    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return {
        "threads": torch.get_num_threads(),
        "devices": ["cpu", *cuda, *mps],
        "kernels": kernel_state(list(cache_folder().rglob("*.nbi")), COMPILED),
    }


def kernel_state(files: Sequence[Path], compiled: bool) -> str:
    """Say in words whether the kernels of the CPU are compiled."""
    if not compiled:
        return "interpreted: numba is not installed (pip install numba)"
    if not files:
        return "not compiled yet: the first watched step does it, once"
    return f"{len(files)} compiled, in {files[0].parent.parent}"
