"""The ε of LayerNorm and RMSNorm as a knob: raised for chosen norms, and put back.

Raising ε by Δε shrinks what a norm writes by ½Δε/(v+ε), with v the token variance,
so it acts only where ε is not far below v. It lowers the norm's gain, 1/√(v+ε), not its
relative error. Three controllers decide when: the published one (``published_rule``,
which cannot fire on normal activations), one that can (``noise_rule``), and BGSS
(``remedies.bgss``).
"""

from dataclasses import dataclass

from torch import nn

from equipoise.errors import InputError
from equipoise.numerics.formats import Format
from equipoise.remedies.base import Undo

DIALS = ("eps", "variance_epsilon")


def epsilons(model: nn.Module) -> dict[str, float]:
    """Return ε of every norm in the model."""
    return {
        name: float(getattr(module, dial))
        for name, module in model.named_modules()
        for dial in DIALS
        if isinstance(getattr(module, dial, None), float)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Epsilon:
    """Set the ε of some norms."""

    values: dict[str, float]
    """Module name → its new ε."""
    name: str = "epsilon"

    def __post_init__(self) -> None:
        for site, eps in self.values.items():
            if not eps > 0:
                raise InputError(f"ε of {site} must be positive, got {eps}")

    def apply(self, model: nn.Module) -> Undo:
        """Set them now; calling the result restores what was there."""
        known = epsilons(model)
        unknown = sorted(set(self.values) - set(known))
        if unknown:
            raise InputError(
                f"no norm called {', '.join(unknown)}; there are {', '.join(known)}"
            )
        for site, eps in self.values.items():
            _set(model.get_submodule(site), eps)

        def undo() -> None:
            for site in self.values:
                _set(model.get_submodule(site), known[site])

        return undo


def _set(module: nn.Module, eps: float) -> None:
    dial = next(d for d in DIALS if isinstance(getattr(module, d, None), float))
    setattr(module, dial, eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormState:
    """What a controller is told about a norm."""

    variance: float
    """Median over tokens of the variance of what enters it."""
    power: float
    """Mean square of what enters it, mean included."""
    width: int
    eps: float


def published_rule(
    state: NormState, format: Format, *, rho: float = 0.6, cap: float = 1e-2
) -> float:
    """Return ε by Baek v1: if ρ_LN < 1, raise to σ²·D·ε_mach/ρ*, within 1e-6 … cap.

    ρ_LN = (σ²/ε)·D·ε_mach < 1 needs σ² < 8e-5 at D = 128 in fp16, and even then ε grows
    at most by 1/ρ*: with activations of any usual size this never fires.
    """
    scale = state.variance * state.width * format.spacing
    if scale / state.eps >= 1:
        return state.eps
    return max(state.eps, min(cap, max(1e-6, scale / rho)))


def noise_rule(
    state: NormState, format: Format, *, share: float = 0.1, cap: float = 1e-2
) -> float:
    """Return the ε at which rounding noise makes up at most ``share`` of the scale.

    Storing x costs a noise of variance n ≈ u²·mean(x²)/3. Where n > share·(v+ε), the
    norm would blow noise up to full size; ε is raised until n = share·(v+ε).
    """
    noise = format.unit_roundoff**2 * state.power / 3
    needed = noise / share - state.variance
    return max(state.eps, min(cap, needed))
