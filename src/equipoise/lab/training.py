"""Options of a training run, and what comes out of one."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from equipoise.lab.launch import Parallel
from equipoise.lab.options import one_of, require
from equipoise.lab.schedule import Schedule
from equipoise.lab.spikes import gradient_spikes, spike_score, spikes
from equipoise.remedies.temperature import TemperatureWarmup

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """AdamW as in Emadi §7: β = (.9, .95), weight decay .1 on matrices, clip 1."""

    steps: int = 150
    batch: int = 8
    """Sequences (or images) per process and micro-batch."""
    accumulation: int = 1
    lr: float = 1e-3
    warmup: int = 15
    floor: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest gradient norm; inf leaves gradients alone."""
    tau_start: float = 1.0
    tau_steps: int = 0
    """Temperature warm-up: τ falls from tau_start to 1 over tau_steps."""
    balance_weight: float = 0.01
    """Of the routers' load-balance loss; it is not part of the reported loss."""
    precision: Precision = "fp32"
    parallel: Parallel = "ddp"
    seed: int = 42
    watch: bool = True
    every: int = 10
    """Measure one step in this many."""
    at: tuple[int, ...] = ()
    """Steps to measure besides."""
    preset: str = "default"
    """What is watched: ``minimal``, ``default`` or ``deep``."""
    parts_every: int = 0
    """Norms of gradient and update per module, one step in this many; 0 is never."""
    give_up: float | None = None
    """End the run early once the mean of ten losses exceeds this or is not finite."""
    checkpoint_every: int = 0
    """0 keeps no checkpoint."""

    def __post_init__(self) -> None:
        one_of("precision", self.precision, ("fp32", "bf16", "fp16"))
        one_of("parallel", self.parallel, ("ddp", "fsdp"))
        for name in ("batch", "accumulation", "every", "clip"):
            require(getattr(self, name) > 0, f"{name} must be positive")
        for name in ("checkpoint_every", "weight_decay", "parts_every"):
            require(getattr(self, name) >= 0, f"{name} cannot be negative")
        self.schedule, self.temperature  # noqa: B018  (validates both on construction)

    @property
    def schedule(self) -> Schedule:
        return Schedule(
            peak=self.lr, steps=self.steps, warmup=self.warmup, floor=self.floor
        )

    @property
    def temperature(self) -> TemperatureWarmup:
        return TemperatureWarmup(start=self.tau_start, steps=self.tau_steps)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands, for a bar or a log."""

    step: int
    steps: int
    loss: float
    gradient_norm: float
    warning: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run in numbers; losses are nats per token (or per image)."""

    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    """Before clipping."""
    clip: float
    seconds: float
    tokens: int
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Norms per module, where they were asked for."""

    @property
    def loss(self) -> float:
        """Mean of the last tenth of the training losses, at least one."""
        if not self.losses:
            return math.nan
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])

    @property
    def spikes(self) -> int:
        return spikes(self.losses)

    @property
    def spike_score(self) -> float:
        return spike_score(self.losses)

    @property
    def gradient_spikes(self) -> int:
        return gradient_spikes(self.gradient_norms, clip=self.clip)
