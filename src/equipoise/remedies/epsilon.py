"""The ε of LayerNorm and RMSNorm: set for chosen norms and undone, and rules for when.

Raising ε by Δε shrinks what a norm writes by ½Δε/(v+ε), with v the token variance,
so it acts only where ε is not far below v. It lowers the norm's gain, 1/√(v+ε), not its
relative error. Three controllers decide when: the published one (``published_rule``,
which cannot fire on normal activations), one that can (``noise_rule``), and BGSS
(``Bgss``): selective increases under a budget, with the constants of its released code.

BGSS acts on a layer when the total scaled risk is in the top fifth of its own past.
Rankings other than the published score (u·risk alone, our RMS share, random) use the
same trigger and the same budget, so that only the choice of layers differs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import nn
from torch.optim import Optimizer

from equipoise.anatomy.sites import unwrapped
from equipoise.errors import InputError
from equipoise.numerics.formats import Format
from equipoise.remedies.base import Changes, RecordedRemedy, Undo

ATTRIBUTES = ("eps", "variance_epsilon")


def epsilons(model: nn.Module) -> dict[str, float]:
    """Return ε of every norm in the model."""
    return {
        name: float(getattr(module, attribute))
        for name, module in model.named_modules()
        for attribute in _attributes(module)
    }


def _attributes(module: nn.Module) -> list[str]:
    return [a for a in ATTRIBUTES if isinstance(getattr(module, a, None), float)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Epsilon(RecordedRemedy):
    """Set the ε of some norms."""

    values: dict[str, float]
    """Module name → its new ε."""
    name: str = "epsilon"
    preserves_function: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for site, eps in self.values.items():
            if not eps > 0:
                raise InputError(f"ε of {site} must be positive, got {eps}")

    def change(self, changes: Changes) -> Undo:
        known = epsilons(changes.model)
        unknown = sorted(set(self.values) - set(known))
        if unknown:
            raise InputError(
                f"no norm called {', '.join(unknown)}; there are {', '.join(known)}"
            )
        for site, eps in self.values.items():
            module = changes.model.get_submodule(site)
            changes.attribute(module, _attributes(module)[0], eps)
        return changes.applied(norms=len(self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormEpsilon:
    """Raise ε of all norms, or of some, to one value; none is lowered."""

    value: float = 1e-3
    only: Sequence[str] = ()
    """Names of norms; all of them by default."""
    name: ClassVar[str] = "layer_norm_epsilon"
    preserves_function: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.value > 0:
            raise InputError(f"value of {self.name} must be positive, not {self.value}")

    def apply(self, model: nn.Module, optimizer: Optimizer | None = None) -> Undo:
        known = epsilons(unwrapped(model))
        if not known:
            raise InputError(
                f"{type(unwrapped(model)).__name__} has no norm with an ε to raise"
            )
        some = self.only or tuple(known)  # a name that is none is refused by Epsilon
        values = {n: self.value for n in some if known.get(n, 0.0) < self.value}
        chosen = Epsilon(values=values, name=self.name)
        return chosen.apply(unwrapped(model), optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormState:
    """What a controller knows about a norm."""

    variance: float
    """Median over tokens of the variance of what enters it."""
    power: float
    """Mean square of what enters it, mean included."""
    width: int
    eps: float


CAP = 1e-2
RHO = 0.6
"""ρ* of Baek v1."""
NOISE_SHARE = 0.1


def published_rule(state: NormState, format: Format) -> float:
    """Return ε by Baek v1: if ρ_LN < 1, raise to σ²·D·ε_mach/ρ*, from 1e-6 to 1e-2.

    ρ_LN = (σ²/ε)·D·ε_mach < 1 needs σ² < 8e-5 at D = 128 in fp16, and even then ε grows
    at most by 1/ρ*: with activations of any usual size this never fires.
    """
    scale = state.variance * state.width * format.spacing
    if scale / state.eps >= 1:
        return state.eps
    return max(state.eps, min(CAP, max(1e-6, scale / RHO)))


def noise_rule(state: NormState, format: Format, *, cap: float = CAP) -> float:
    """Return the ε at which rounding noise makes up at most a tenth of the scale.

    Storing x costs a noise of variance n ≈ u²·mean(x²)/3. Where n > 0.1·(v+ε), the
    norm would blow noise up to full size; ε is raised until n = 0.1·(v+ε).
    """
    noise = format.unit_roundoff**2 * state.power / 3
    needed = noise / NOISE_SHARE - state.variance
    return max(state.eps, min(cap, needed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The released settings."""

    warmup: int = 24
    quantile: float = 0.8
    per_step: int = 2
    total: int = 24
    per_layer: int = 6
    cooldown: int = 10
    base: float = 1e-5
    ceiling: float = 1e-2
    growth: float = 4.0
    damping: float = 0.6

    def __post_init__(self) -> None:
        if not 0 < self.base < self.ceiling:
            raise InputError(f"ε must rise from {self.base} towards {self.ceiling}")


@dataclass(slots=True)
class Bgss:
    """The controller: given scores each step, it returns new values of ε."""

    layers: int
    budget: Budget = field(default_factory=Budget)
    eps: list[float] = field(init=False)
    actions: list[int] = field(init=False)
    _last: list[float] = field(init=False)
    _past: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.eps = [self.budget.base] * self.layers
        self.actions = [0] * self.layers
        self._last = [-math.inf] * self.layers

    def step(
        self, step: int, *, total_risk: float, scores: list[float]
    ) -> dict[int, float]:
        """Return the layers to change now and their new ε; often none.

        Args:
            step: counted from 0.
            total_risk: Σ u·risk over layers, the trigger.
            scores: what layers are ranked by.
        """
        if len(scores) != self.layers:
            raise InputError(f"{len(scores)} scores for {self.layers} layers")
        fires = self._fires(step, total_risk)
        self._past.append(total_risk)
        if not fires:
            return {}
        open_ = [i for i in range(self.layers) if self._eligible(i, step)]
        left = self.budget.total - sum(self.actions)
        ranked = sorted(open_, key=lambda i: self._priority(i, scores[i]), reverse=True)
        chosen = ranked[: max(0, min(self.budget.per_step, left))]
        for i in chosen:
            self._raise(i, step)
        return {i: self.eps[i] for i in chosen}

    def headroom(self, layer: int) -> float:
        """Return h = (ε_max - ε)/(ε_max - ε_base)."""
        b = self.budget
        return (b.ceiling - self.eps[layer]) / (b.ceiling - b.base)

    def _fires(self, step: int, total_risk: float) -> bool:
        if step < self.budget.warmup or not self._past:
            return False
        return total_risk >= float(np.quantile(self._past, self.budget.quantile))

    def _eligible(self, layer: int, step: int) -> bool:
        b = self.budget
        rested = step - self._last[layer] > b.cooldown
        return (
            rested and self.eps[layer] < b.ceiling and self.actions[layer] < b.per_layer
        )

    def _priority(self, layer: int, score: float) -> float:
        h = self.headroom(layer)
        return score * (0.5 + 0.5 * h) / math.sqrt(1 + self.actions[layer])

    def _raise(self, layer: int, step: int) -> None:
        b, h, n = self.budget, self.headroom(layer), self.actions[layer]
        factor = 1 + (b.growth - 1) * (0.25 + 0.75 * h) / (1 + b.damping * n)
        self.eps[layer] = min(b.ceiling, self.eps[layer] * factor)
        self.actions[layer] += 1
        self._last[layer] = step
