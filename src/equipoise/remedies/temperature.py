"""Attention temperature: soften every head, and cool down over a warm-up.

Scores are divided by τ on top of what the model does. ‖∂softmax/∂scores‖ is θ/τ, so
τ > 1 throttles attention alone and leaves feed-forward and embeddings free (Emadi §6).
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.discovery import anatomy_of
from equipoise.errors import InputError
from equipoise.remedies.attention_hooks import TORCH, Letter, edit_heads
from equipoise.remedies.base import Changes, Count, Positive, RecordedRemedy, Undo

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
class Temperature(RecordedRemedy):
    """Divide every score by τ; with ``steps`` it cools down to 1 over so many."""

    tau: Positive = 2.0
    steps: Count = 0
    name: ClassVar[str] = "temperature"
    preserves_function: ClassVar[bool] = False

    def change(self, changes: Changes) -> Undo:
        if self.steps:
            changes.count_steps()
        settings = _settings(changes)
        for setting in settings:
            setting.set(self.tau)
        if self.steps:
            course = TemperatureWarmup(start=self.tau, steps=self.steps)

            def cool(optimizer: Optimizer) -> None:
                for setting in settings:
                    setting.set(course.at(changes.progress["step"]))

            changes.after_step(cool)
        return changes.applied(tau=self.tau, steps=self.steps)


class Setting(Protocol):
    """Something whose temperature can be set."""

    def set(self, tau: float) -> None: ...


def _settings(changes: Changes) -> list[Setting]:
    """Return the model's own settings; where it has none, its queries are divided."""
    torch_sites = [
        site
        for site in anatomy_of(changes.model).attention
        if type(site.module).__name__ == TORCH
    ]
    if not torch_sites:
        found: list[Setting] = []
        for setting in temperature_settings(changes.model):
            now = getattr(setting.module, setting.attribute)
            changes.attribute(setting.module, setting.attribute, now)
            found.append(setting)
        return found
    scales = [QueryTemperature() for _ in torch_sites]
    for site, scale in zip(torch_sites, scales, strict=True):
        edit_heads(changes, site, scale)
    return list(scales)


@dataclass(slots=True)
class QueryTemperature:
    """Divides queries by τ, where a module has no number that sets its scale."""

    tau: float = 1.0

    def set(self, tau: float) -> None:
        self.tau = tau

    def __call__(self, letter: Letter, x_xHD: Tensor) -> Tensor:
        return x_xHD if letter == "k" else x_xHD / self.tau


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
