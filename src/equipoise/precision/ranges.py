"""Which modules store numbers a format cannot hold: too large, too small, a lost ε."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equipoise.numerics.formats import Format
from equipoise.numerics.fragility_norm import epsilon_stored
from equipoise.numerics.fragility_range import RangeUse, range_use
from equipoise.precision.batch import Batch, output_of
from equipoise.precision.emulation import Storage
from equipoise.precision.operations import HIDDEN
from equipoise.precision.walk import LinearCall, walked


def range_by_module(
    model: nn.Module, batch: Batch, *, storage: Storage
) -> dict[str, RangeUse]:
    """Return, per module, the worst shares over what it stores, parameters included.

    With scaled storage the shares are those after scaling.
    """
    looking = _Looking(storage)
    with torch.no_grad(), walked(model, looking):
        output_of(model, batch)
    return {site: _worst(uses) for site, uses in looking.uses.items() if uses}


def lost_epsilons(model: nn.Module, format: Format) -> dict[str, float]:
    """Return the norms whose ε is rounded to 0 or goes subnormal, with what is left.

    It matters only where the norm itself runs in the format; stock kernels add ε in
    float32.
    """
    found = {}
    for name, module in model.named_modules():
        eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
        if isinstance(eps, float) and 0 < eps < format.smallest_normal:
            found[name] = epsilon_stored(eps, format)
    return found


@dataclass(slots=True)
class _Looking:
    storage: Storage
    uses: dict[str, list[RangeUse]] = field(default_factory=dict)

    def parameter(self, site: str, parameter: nn.Parameter) -> Tensor:
        self._look(site, parameter)
        return parameter

    def stored(self, site: str, kind: str, x: Tensor) -> Tensor:
        self._look(site, x)
        return x

    def rows(self, site: str, ids: Tensor, weight: nn.Parameter) -> Tensor:
        return self.stored(site, "weight", nn.functional.embedding(ids, weight))

    def linear(self, site: str, call: LinearCall) -> Tensor:
        self._look(site, call.weight)
        y = nn.functional.linear(call.x, call.oriented(call.weight), call.bias)
        return self.stored(site, "product", y)

    def _look(self, site: str, x: Tensor) -> None:
        plain = x.detach()
        plain = plain[plain.abs() < HIDDEN]
        use = range_use(plain * self.storage.scale(plain), self.storage.format)
        self.uses.setdefault(site, [])
        if use.overflow == use.overflow:  # NaN: nothing there but zeros
            self.uses[site].append(use)


def _worst(uses: list[RangeUse]) -> RangeUse:
    return RangeUse(
        overflow=max(use.overflow for use in uses),
        subnormal=max(use.subnormal for use in uses),
        flushed=max(use.flushed for use in uses),
    )
