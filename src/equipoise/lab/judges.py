"""What else can be asked of a model when its run is over, by name.

Axes, in this file:  B batch · H head · Q query · N every weight in one vector.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.interception import Interceptor
from equipoise.anatomy.registry import anatomy_of
from equipoise.errors import InputError
from equipoise.lab.data import Batch, Batches
from equipoise.numerics.attention_rows import row_statistics
from equipoise.numerics.extremes import extremes
from equipoise.numerics.stopping import Search

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
    model = trained.model
    weights = [p for p in model.parameters() if p.requires_grad]
    x, y = trained.batch
    # The fused kernel has no second derivative.
    with sdpa_kernel(SDPBackend.MATH):
        loss = F.cross_entropy(model(x).flatten(0, -2).float(), y.flatten())
        slopes = torch.autograd.grad(loss, weights, create_graph=True)
        scale_N = torch.cat(
            [d.flatten() for d in preconditioner(trained.optimizer, weights)]
        ).rsqrt()
        slope_N = torch.cat([g.flatten() for g in slopes])

        def product(x_N: Tensor) -> Tensor:
            seed = (slope_N * (scale_N * x_N).detach()).sum()
            rows = torch.autograd.grad(seed, weights, retain_graph=True)
            return scale_N * torch.cat([r.flatten() for r in rows])

        start_N = torch.randn(
            scale_N.numel(), generator=torch.Generator().manual_seed(0)
        )
        found = extremes(product, start_N, search=SEARCH).largest
    return {"sharpness": found.value, "sharpness_error": found.error}


def preconditioner(
    optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter]
) -> list[Tensor]:
    """Return Adam's √v̂ + ε for each weight; ε where it has never been stepped."""
    group = optimizer.param_groups[0]
    beta, epsilon = group["betas"][1], group["eps"]
    found = []
    for weight in weights:
        state = optimizer.state.get(weight)
        if not state:
            raise InputError(
                "Adam has taken no step: it has no geometry of its own yet"
            )
        unbiased = state["exp_avg_sq"] / (1 - beta ** float(state["step"]))
        found.append(unbiased.sqrt() + epsilon)
    return found


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
    from equipoise.lab.convergence import convergence

    return convergence(trained)


def curvature(trained: Trained) -> dict[str, float]:
    """Return the Hessian's norm group by group; see ``lab.curvature``."""
    from equipoise.lab.curvature import curvature

    return curvature(trained)


def entries(trained: Trained) -> dict[str, float]:
    """Return the size of the Hessian's entries, and leave a picture of them."""
    from equipoise.lab.curvature import entries

    return entries(trained)


def selection(trained: Trained) -> dict[str, float]:
    """Return loss, θ and selectivity at longer contexts; see ``lab.selection``."""
    from equipoise.lab.selection import selection

    return selection(trained)


def kept(trained: Trained) -> dict[str, float]:
    """Leave the weights beside the result; measure nothing."""
    from equipoise.lab.kept import keep

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
