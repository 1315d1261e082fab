"""Attention temperature: soften every head, and cool down over a warm-up.

Scores are divided by τ on top of what the model does. ‖∂softmax/∂scores‖ is θ/τ, so
τ > 1 throttles attention alone and leaves feed-forward and embeddings free (Emadi §6).
"""

from dataclasses import dataclass

from torch import nn

from equipoise.errors import InputError
from equipoise.remedies.base import Undo

# Attribute that holds a plain number → the power of τ it is multiplied by.
POWERS = {"temperature": 1, "scaling": -1}


@dataclass(frozen=True, slots=True)
class TemperatureSetting:
    """One attention module's number, and what it was."""

    module: nn.Module
    attribute: str
    original: float

    def set(self, tau: float) -> None:
        value = self.original * tau ** POWERS[self.attribute]
        setattr(self.module, self.attribute, value)


def temperature_settings(model: nn.Module) -> list[TemperatureSetting]:
    """Return what sets the temperature of each attention in the model.

    Our lab's attention has ``temperature``; Hugging Face's have ``scaling``.
    """
    found = [
        TemperatureSetting(module, attribute, float(value))
        for name, module in model.named_modules()
        for attribute in POWERS
        if isinstance(value := getattr(module, attribute, None), float)
        and "attention" in type(module).__name__.lower()
    ]
    if not found:
        raise InputError(
            f"{type(model).__name__} has no attention whose temperature can be set: "
            f"an *Attention module needs a float attribute {' or '.join(POWERS)}"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """Divide every score by τ."""

    tau: float
    name: str = "temperature"

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise InputError(f"temperature {self.tau} is not positive")

    def apply(self, model: nn.Module) -> Undo:
        found = temperature_settings(model)
        for setting in found:
            setting.set(self.tau)

        def undo() -> None:
            for setting in found:
                setting.set(1)

        return undo


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureWarmup:
    """τ falls from ``start`` to 1 over ``steps`` steps, linearly.

    >>> warmup = TemperatureWarmup(start=5.0, steps=4)
    >>> [warmup.at(step) for step in range(6)]
    [5.0, 4.0, 3.0, 2.0, 1.0, 1.0]
    """

    start: float = 4.0
    steps: int = 100

    def __post_init__(self) -> None:
        if not self.start > 0 or self.steps < 0:
            raise InputError(
                f"a temperature warm-up needs start > 0 and steps ≥ 0, "
                f"not {self.start} and {self.steps}"
            )

    def at(self, step: int) -> float:
        """Return τ for the given step, counted from 0."""
        if step >= self.steps:
            return 1.0
        return self.start + (1 - self.start) * step / self.steps
