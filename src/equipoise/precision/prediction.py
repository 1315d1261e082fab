"""The error that low precision will make, from one forward and one backward pass.

Axes, in this file: N tokens · K input features · M output features.

To first order the output moves by Σ (∂Y/∂x)·r(x) over every stored number x, with r(x)
its rounding residual. Residuals are as good as independent, so the mean square is
Σ r(x)²‖∂Y/∂x‖²; and for a random output probe ξ with unit variances,
E(∂⟨ξ,Y⟩/∂x)² = ‖∂Y/∂x‖². So one backward pass of ⟨ξ,Y⟩ carries every module's residuals
to the output at once, and a module's share is Σ r²g² over what it stores.

Weight gradients are not formed: for W the sum is estimated from every n-th output
feature, counted from a random one.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equipoise.errors import InputError
from equipoise.precision.batch import Batch, output_of
from equipoise.precision.emulation import Storage
from equipoise.precision.operations import HIDDEN
from equipoise.precision.walk import LinearCall, walked

SAMPLED_FEATURES = 64
CHUNK = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted relative error of the output, by module and by what is stored there."""

    variance: dict[str, dict[str, float]]
    """Per module and kind: E‖ΔY‖²/‖Y‖²."""

    @property
    def by_module(self) -> dict[str, float]:
        """Return the predicted relative error with only that module narrow."""
        return {s: math.sqrt(sum(k.values())) for s, k in self.variance.items()}

    @property
    def total(self) -> float:
        """Return the predicted relative error with every module narrow."""
        return math.sqrt(sum(sum(k.values()) for k in self.variance.values()))

    @property
    def shares(self) -> dict[str, float]:
        """Return each module's share of the predicted mean square error."""
        total = self.total**2
        return {s: sum(k.values()) / total for s, k in self.variance.items()}

    def dominant(self, site: str) -> str:
        """Return what contributes most at a module: weight, score, prob, product, …"""
        return max(self.variance[site], key=self.variance[site].__getitem__)


def predicted(
    model: nn.Module, batch: Batch, *, storage: Storage, probes: int = 1, seed: int = 0
) -> Prediction:
    """Return the predicted error of the model's output on a batch, module by module.

    Args:
        model: run as it is, in its own dtype (float32 or float64), in eval mode.
        batch: what to call it on.
        storage: the format every module would store its numbers in.
        probes: random output probes; one backward pass each.
        seed: of the probes and of the sampled output features.

    First order, residuals independent, no overflow: read it with the range table.
    """
    if probes < 1:
        raise InputError(f"predicted needs at least one probe, got {probes}")
    rng = torch.Generator().manual_seed(seed)
    carriage = _Carriage(storage, rng)
    training = model.training
    try:
        model.eval()
        with torch.enable_grad(), walked(model, carriage):
            y = output_of(model, batch)
    finally:
        model.train(training)
    size = float(y.detach().double().norm())
    if not (math.isfinite(size) and size > 0):
        raise InputError(
            f"the model's output has norm {size}: nothing to be relative to"
        )
    for _ in range(probes):
        signs = torch.randint(0, 2, y.shape, generator=rng).to(y) * 2 - 1
        # Divided by ‖Y‖ here: squares of raw gradients may leave float32's range.
        torch.autograd.backward(y, signs / size, retain_graph=probes > 1)
    return carriage.prediction(probes)


@dataclass(slots=True)
class _Carriage:
    """Notes Σ r²g² of everything stored, as gradients come past."""

    storage: Storage
    rng: torch.Generator
    sums: dict[str, dict[str, list[Tensor]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    _leaves: dict[tuple[str, int], tuple[nn.Parameter, Tensor]] = field(
        default_factory=dict
    )

    def parameter(self, site: str, parameter: nn.Parameter) -> Tensor:
        key = (site, id(parameter))
        if key not in self._leaves:
            leaf = parameter.detach().requires_grad_()
            self._note(site, "weight", leaf)
            self._leaves[key] = (parameter, leaf)
        return self._leaves[key][1]

    def stored(self, site: str, kind: str, x: Tensor) -> Tensor:
        # The first live tensors have no history: start one, safe for in-place calls.
        y = x if x.requires_grad else x.detach().requires_grad_().clone()
        self._note(site, kind, y)
        return y

    def rows(self, site: str, ids: Tensor, weight: nn.Parameter) -> Tensor:
        # A row used twice carries one residual, not two: gather from unique rows.
        unique, inverse = ids.unique(return_inverse=True)
        leaf = weight.detach()[unique].requires_grad_()
        self._note(site, "weight", leaf)
        return nn.functional.embedding(inverse, leaf)

    def linear(self, site: str, call: LinearCall) -> Tensor:
        weight_MK = call.oriented(call.weight.detach())
        bias = None if call.bias is None else call.bias.detach()
        y = nn.functional.linear(call.x, weight_MK, bias)
        y = self.stored(site, "product", y)
        self._on_gradient(y, self._weight_note(site, call.x.detach(), weight_MK, bias))
        return y

    def prediction(self, probes: int) -> Prediction:
        return Prediction(
            variance={
                site: {kind: float(sum(v)) / probes for kind, v in kinds.items()}
                for site, kinds in self.sums.items()
            }
        )

    def _note(self, site: str, kind: str, x: Tensor) -> None:
        value = x.detach()
        total = self.sums[site][kind]

        def note(g: Tensor) -> None:
            total.append(self._carried(value, g))

        self._on_gradient(x, note)

    def _weight_note(
        self, site: str, x: Tensor, weight_MK: Tensor, bias_M: Tensor | None
    ) -> Callable[[Tensor], None]:
        total = self.sums[site]["weight"]

        def note(g: Tensor) -> None:
            g_NM, x_NK = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
            M = weight_MK.shape[0]
            step = max(1, M // SAMPLED_FEATURES)
            start = int(torch.randint(0, step, (), generator=self.rng))
            g_mK = g_NM[:, start::step].mT @ x_NK
            sample = self._carried(weight_MK[start::step], g_mK)
            total.append(sample * (M / g_mK.shape[0]))
            if bias_M is not None:
                total.append(self._carried(bias_M, g_NM.sum(0)))

        return note

    def _carried(self, value: Tensor, g: Tensor) -> Tensor:
        x, g = value.reshape(-1), g.reshape(-1)
        total = self._chunked(x, g)
        if total.isfinite():
            return total
        hides = x.abs() >= HIDDEN
        return self._chunked(x.masked_fill(hides, 0.0), g.masked_fill(hides, 0.0))

    def _chunked(self, x: Tensor, g: Tensor) -> Tensor:
        """Return Σ r²g², a cache-sized piece at a time: three times as fast."""
        scale = self.storage.scale(x)
        total = x.new_zeros((), dtype=torch.float64)
        for some_x, some_g in zip(x.split(CHUNK), g.split(CHUNK), strict=True):
            r = self.storage.rounded_plain(some_x, scale).sub_(some_x).mul_(some_g)
            total += torch.dot(r, r)
        return total

    @staticmethod
    def _on_gradient(x: Tensor, note: Callable[[Tensor], None]) -> None:
        def hook(g: Tensor) -> None:
            with torch.no_grad():
                note(g)

        x.register_hook(hook)
