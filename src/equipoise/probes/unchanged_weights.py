"""Weights that stay what they were although the optimiser moves them."""

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.sharding import local_part
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.gradients import owned_parameters
from equipoise.probes.protocols import Emit

PROBED = 256
"""Weights of each block that are remembered from one sampled step to the next."""


@dataclass(slots=True)
class UnchangedWeights:
    """Emit the share of weights that are what they were at the last sampled step.

    Read before the optimiser moves them, at up to 256 places of each block's largest
    parameter that have a gradient. A weight that is stored in too few bits stays where
    it is however often it is updated.
    """

    name: str = "unchanged weights"
    _before: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    """Block → which parameter was remembered, and its weights."""
    _updated: bool = True
    """Whether the optimiser has moved since: micro-batches share their weights."""

    def on_gradients(
        self, anatomy: Anatomy, emit: Emit, *, scale: Tensor | None
    ) -> None:
        if not self._updated:
            return
        self._updated = False
        for site, parameter in _largest(anatomy).items():
            grad = parameter.grad
            assert grad is not None
            w, g = _probed(parameter.detach()), _probed(grad)
            key, before = self._before.get(site, (0, w))
            if key == id(parameter) and before.shape == w.shape == g.shape:
                active = g != 0
                same = ((before == w) & active).sum() / active.sum()
                emit(site, "update.unchanged", same, how="mean")
            self._before[site] = id(parameter), w.clone()

    def on_update(self, optimizer: Optimizer, emit: Emit) -> None:
        self._updated = True


def _largest(anatomy: Anatomy) -> dict[str, nn.Parameter]:
    """Return of each block the largest parameter that is trained."""
    found: dict[str, nn.Parameter] = {}
    for site, parameter in owned_parameters(anatomy):
        if parameter.grad is None or site not in anatomy.blocks:
            continue
        if site not in found or parameter.numel() > found[site].numel():
            found[site] = parameter
    return found


def _probed(x: Tensor) -> Tensor:
    """Return this rank's numbers at places that are spread evenly."""
    flat = local_part(x).reshape(-1)
    return flat[:: max(1, flat.numel() // PROBED)][:PROBED]
