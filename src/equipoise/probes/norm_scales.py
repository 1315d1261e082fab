"""LayerNorm and RMSNorm as they act on today's tokens: their scale and their gain.

Axes, in this file:  B batch · T token · D width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.sharding import local_part
from equipoise.anatomy.sites import Anatomy
from equipoise.numerics.token_statistics import token_sizes
from equipoise.probes.capture import Emit, Guarded
from equipoise.probes.inputs import at_inputs

EPSILONS = ("eps", "variance_epsilon", "epsilon")


@dataclass(frozen=True, slots=True)
class NormScales:
    """Emit σ (median and smallest over tokens) and the local gain ‖γ‖_∞/σ_min.

    The gain is the largest factor by which the norm passes a small change of one
    token on; for constant γ it is exact, otherwise an upper bound.
    """

    name: str = "normalisers"

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        yield from at_inputs(anatomy.norms, partial(_listen, emit), guarded)


def _listen(emit: Emit, site: str, module: nn.Module, x_BTD: Tensor) -> None:
    sigma_N = _scale(module, x_BTD).flatten()
    least = sigma_N.amin()
    emit(site, "norm.sigma.p50", sigma_N.median(), how="mean")
    emit(site, "norm.sigma.min", least, how="min")
    emit(site, "norm.gain", _largest_weight(module, least) / least, how="max")


def _scale(module: nn.Module, x_BTD: Tensor) -> Tensor:
    found = (getattr(module, name, None) for name in EPSILONS)
    eps = next((e for e in found if e is not None), torch.finfo(x_BTD.dtype).eps)
    sizes = token_sizes(x_BTD)
    centred = "RMS" not in type(module).__name__
    size = sizes.around_mean if centred else sizes.around_zero
    return torch.hypot(size, size.new_tensor(eps**0.5))


def _largest_weight(module: nn.Module, like: Tensor) -> Tensor:
    weight = getattr(module, "weight", None)
    if weight is None:
        return torch.ones_like(like)
    largest: Tensor = local_part(weight.detach()).abs().amax().to(like.dtype)
    return largest
