"""σReparam: a projection becomes γ·W/σ(W), with σ its spectral norm and γ learned.

After Zhai et al. (arXiv 2303.06296). γ starts at σ(W), so nothing changes when it is
switched on. The stored matrix stays W: what the module returns is scaled by γ/σ(W), as
γ/σ·(Wx) + b. One power iteration per training pass follows σ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.anatomy.sharding import local_part, whole
from equipoise.anatomy.sites import AttentionSite
from equipoise.errors import InputError
from equipoise.remedies.attention_hooks import (
    TORCH,
    add_edit,
    attention_sites,
    projections_of,
)
from equipoise.remedies.base import Changes, RecordedRemedy, Undo, same_bits

ITERATIONS, SETTLED = 500, 2e-7
"""To begin with, until σ moves by less; one per training pass follows from there."""


class SpectralScale:
    """γ/σ(W) for one matrix; u and v are its singular vectors, followed."""

    def __init__(self, weight: Tensor, version: int) -> None:
        self.version = version
        start = weight.new_ones(weight.shape[1], dtype=torch.float32)
        self.v = start / start.norm()
        self.u = torch.zeros_like(weight[:, 0], dtype=torch.float32)
        last = 0.0
        for _ in range(ITERATIONS):
            self._iterate(weight)
            now = float(self.sigma(weight))
            if abs(now - last) <= SETTLED * now:
                break
            last = now
        self.gamma = nn.Parameter(self.sigma(weight.detach().float()).clone())

    def follow(self, weight: Tensor) -> None:
        """Take one power iteration if the weight has changed since the last."""
        if weight._version != self.version:
            self.version = weight._version
            self._iterate(weight)

    @torch.no_grad()
    def _iterate(self, weight: Tensor) -> None:
        wide = weight.detach().float()
        self.u = nn.functional.normalize(wide @ self.v, dim=0)
        self.v = nn.functional.normalize(wide.mT @ self.u, dim=0)

    def sigma(self, weight: Tensor) -> Tensor:
        found: Tensor = self.u @ (weight.float() @ self.v)
        return found

    def share(self, weight: Tensor) -> Tensor:
        """Return γ/σ(W), through which gradients reach W and γ."""
        return (self.gamma / self.sigma(weight)).to(weight.dtype)


@dataclass(slots=True)
class ScaledOutput:
    """Scales what a linear module returns, its bias left out."""

    scale: SpectralScale

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        weight: Tensor = module.weight  # type: ignore[assignment]
        if module.training and torch.is_grad_enabled():
            self.scale.follow(weight)
        share = self.scale.share(weight)
        scaled: Tensor = output * share
        bias = getattr(module, "bias", None)
        return scaled if bias is None else scaled + bias * (1 - share)


@dataclass(slots=True)
class ScaledWeight:
    """Scales a matrix that is handed to a function, as torch's own attention does."""

    scale: SpectralScale

    def __call__(self, weight: Tensor) -> Tensor:
        if weight.requires_grad and torch.is_grad_enabled():
            self.scale.follow(weight)
        return weight * self.scale.share(weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmaReparam(RecordedRemedy):
    """Reparametrise the projections of attention by their spectral norms."""

    only: Sequence[str] = ()
    """Names of attention modules; all of them by default."""
    name: ClassVar[str] = "sigma_reparam"

    def change(self, changes: Changes) -> Undo:
        sites = attention_sites(changes.model, self.only)
        found = [m for site in sites for m in _matrices(site)]
        for site, module, attribute in found:
            _install(changes, site, module, attribute)
        return changes.applied(matrices=len(found))


def _matrices(site: AttentionSite) -> Iterator[tuple[AttentionSite, nn.Module, str]]:
    """Yield each stored matrix of a site once: a fused one is one matrix."""
    maps, seen = projections_of(site), set[int]()
    for weight in (maps.q, maps.k, maps.v, maps.o):
        stored = getattr(weight.module, weight.attribute)
        if id(stored) not in seen:
            seen.add(id(stored))
            yield site, weight.module, weight.attribute


def _install(
    changes: Changes, site: AttentionSite, module: nn.Module, attribute: str
) -> None:
    if hasattr(module, "base_layer"):
        raise InputError(
            f"{site.name} has adapters beside its projections; merge them before "
            "sigma_reparam"
        )
    weight: nn.Parameter = getattr(module, attribute)
    scale = SpectralScale(whole(weight.detach()), weight._version)
    changes.undo_by(_Fold(changes, weight, scale).back, id(weight))
    changes.parameter(module, f"sigma_reparam_{attribute}", scale.gamma)
    if type(site.module).__name__ == TORCH:
        add_edit(changes, site, "weights", (weight, ScaledWeight(scale)))
    else:
        changes.hook(module.register_forward_hook(ScaledOutput(scale)))


class _Fold:
    """Writes γ/σ into the matrix when it is undone, unless nothing was learned."""

    def __init__(
        self, changes: Changes, weight: nn.Parameter, scale: SpectralScale
    ) -> None:
        self.changes, self.weight, self.scale = changes, weight, scale
        self.before = local_part(weight.detach()).clone()
        self.gamma = scale.gamma.detach().clone()

    @torch.no_grad()
    def back(self) -> None:
        here = local_part(self.weight.detach())
        learned = not same_bits(self.scale.gamma, self.gamma)
        if not learned and same_bits(here, self.before):
            return
        share = self.scale.share(whole(self.weight.detach()))
        here.mul_(share)
        optimizer = self.changes.required_optimizer
        state = optimizer.state.get(self.weight, {})
        for name, power in (("exp_avg", -1), ("exp_avg_sq", -2)):
            if name in state:  # the gradient of γW/σ is that of W over the share
                local_part(state[name]).mul_(share**power)
