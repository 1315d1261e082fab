"""What else can be asked of a model when its run is over, by name.

Axes, in this file:  Q query.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.interception import Interceptor
from equipoise.auditing.curvature import edge_of_stability
from equipoise.errors import InputError
from equipoise.lab.data import Batch, Batches
from equipoise.numerics.rows.statistics import row_statistics
from equipoise.numerics.spectra.estimate import Search

SEARCH = Search(tolerance=0.02, failure=None, at_most=60)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model at the end of its run, and data it has not seen."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch
    seen: Batches | None = None
    """What it was trained on, from where training stopped."""
    folder: Path | None = None
    """Where a judge may leave a figure."""


def sharpness(trained: Trained) -> dict[str, float]:
    """Return λ_max of D^(-1/2) H D^(-1/2), D = Adam's √v̂ + ε: its own geometry.

    Adam with momentum β₁ is stable on a quadratic while lr · λ < (2 + 2β₁)/(1 - β₁).
    """
    found = edge_of_stability(
        trained.model, trained.batch, trained.optimizer, search=SEARCH
    ).value
    return {"sharpness": found.value, "sharpness_error": found.error}


def positions(trained: Trained) -> dict[str, float]:
    """Return by layer and query the mean θ, and the share of rows with p_max ≥ ½."""
    found: dict[str, float] = {}
    heard: list[AttentionCall] = []
    with torch.no_grad(), Interceptor(anatomy_of(trained.model), heard.append):
        trained.model(trained.batch[0])
    for layer, call in enumerate(heard):
        rows = row_statistics(call.scores(slice(0, call.shape[2])))
        theta_Q = rows.theta_lower.double().mean((0, 1)).tolist()
        sharp_Q = (rows.p_max >= 0.5).double().mean((0, 1)).tolist()
        found |= {f"theta_{layer}_{at}": theta for at, theta in enumerate(theta_Q)}
        found |= {f"sharp_{layer}_{at}": sharp for at, sharp in enumerate(sharp_Q)}
    return found


def convergence(trained: Trained) -> dict[str, float]:
    """Return how the mean loss moves with one more sample; see ``lab.convergence``."""
    from equipoise.lab.studies.convergence.measurement import convergence

    return convergence(trained)


def curvature(trained: Trained) -> dict[str, float]:
    """Return the Hessian's norm group by group; see ``lab.curvature``."""
    from equipoise.lab.studies.curvature.measurement import curvature

    return curvature(trained)


def entries(trained: Trained) -> dict[str, float]:
    """Return the size of the Hessian's entries, and leave a picture of them."""
    from equipoise.lab.studies.curvature.measurement import entries

    return entries(trained)


def selection(trained: Trained) -> dict[str, float]:
    """Return loss, θ and selectivity at longer contexts; see ``lab.selection``."""
    from equipoise.lab.studies.selection.measurement import selection

    return selection(trained)


def kept(trained: Trained) -> dict[str, float]:
    """Leave the weights beside the result; measure nothing."""
    from equipoise.lab.running.saved_runs import keep

    keep(trained)
    return {}


Judge = Callable[[Trained], dict[str, float]]
JUDGES: dict[str, Judge] = {
    "sharpness": sharpness,
    "positions": positions,
    "convergence": convergence,
    "curvature": curvature,
    "entries": entries,
    "selection": selection,
    "kept": kept,
}


def judged(name: str, trained: Trained) -> dict[str, float]:
    """Return what the named judge says."""
    if name not in JUDGES:
        raise InputError(f"no judge {name!r}; there are {', '.join(JUDGES)}")
    return JUDGES[name](trained)
