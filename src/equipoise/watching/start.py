"""``equipoise.watch``: from a model and an optimiser to a running instrument."""

import datetime
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

import equipoise
from equipoise.anatomy.names import unwrapped
from equipoise.anatomy.registry import anatomy_of
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.attention import AttentionRows
from equipoise.probes.capture import Probe
from equipoise.probes.gain import ProjectionGain
from equipoise.probes.gradients import GradientNorms
from equipoise.probes.magnitudes import Magnitudes
from equipoise.records import RunInfo
from equipoise.store import RunWriter, run_path
from equipoise.watching.handle import Watch, log
from equipoise.watching.options import WatchOptions


def watch(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    run: str | Path | None = None,
    name: str | None = None,
    info: dict[str, Any] | None = None,
    **options: Any,
) -> Watch:
    """Attach to a model; every ``optimizer.step()`` from now on is recorded.

    Args:
        model: Any PyTorch model. Watching changes nothing in it.
        optimizer: With it the loop needs no other edit; without it call ``.step()``.
        run: The run file; by default one under ``$EQUIPOISE_RUNS`` or ``./runs``.
        name: What the run is called; by default the model's class.
        info: JSON values to keep with the run, such as the corpus or the commit.
        options: Fields of :class:`WatchOptions`.
    """
    chosen = WatchOptions(**options)
    anatomy = anatomy_of(model)
    title = name or type(unwrapped(model)).__name__
    writer = RunWriter(run_path(run, title), _run_info(title, anatomy, info or {}))
    handle = Watch(anatomy, probes(), writer, optimizer=optimizer, options=chosen)
    log.info(
        "equipoise: %d attention sites, run %s", len(anatomy.attention), handle.path
    )
    return handle


def probes() -> list[Probe]:
    """Return the default probes, new: each keeps the state of one watched model."""
    return [AttentionRows(), ProjectionGain(), Magnitudes(), GradientNorms()]


def _run_info(name: str, anatomy: Anatomy, given: dict[str, Any]) -> RunInfo:
    model = unwrapped(anatomy.model)
    details = {
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "attention": [site.name for site in anatomy.attention],
        "blocks": list(anatomy.blocks),
        "guessed": list(anatomy.guessed),
        **given,
    }
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return RunInfo(
        name=name, created=created, version=equipoise.__version__, details=details
    )
