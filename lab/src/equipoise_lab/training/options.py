"""Options of a training run, its learning-rate schedule, and what comes out of it.

Loss spikes are counted by rules that are written down here.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from equipoise.remedies.temperature import TemperatureWarmup
from equipoise_lab.options import one_of, require
from equipoise_lab.training.distributed import Parallel


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """Linear warm-up, then half a cosine down to ``floor`` · peak.

    >>> schedule = RateSchedule(peak=1.0, steps=10, warmup=4, floor=0.1)
    >>> [round(schedule.at(step), 3) for step in (0, 3, 4, 10)]
    [0.25, 1.0, 1.0, 0.1]
    """

    peak: float = 1e-3
    steps: int = 150
    warmup: int = 15
    floor: float = 0.1

    def __post_init__(self) -> None:
        require(self.peak > 0, f"the peak learning rate {self.peak} is not positive")
        require(self.steps > 0, "steps must be positive")
        require(
            0 <= self.warmup <= self.steps,
            f"a warm-up of {self.warmup} does not fit {self.steps} steps",
        )
        require(0 <= self.floor <= 1, f"floor {self.floor} is not in [0, 1]")

    def at(self, step: int) -> float:
        """Return the learning rate of the given step, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return self.peak * (self.floor + (1 - self.floor) * cosine)


# A loss spike: above the median of the last 50 losses by more than 6 robust standard
# deviations (1.4826 · MAD), at least 0.1 nats; consecutive steps are one spike.
WINDOW, DEVIATIONS, LEAST = 50, 6.0, 0.1


def spikes(losses: Sequence[float]) -> int:
    """Return how many times the loss jumped; a loss that is not finite is one too.

    >>> spikes([3.0] * 60 + [5.0, 5.0] + [3.0] * 60)
    1
    """
    x = np.asarray(losses, dtype=float)
    above = [_jumped(x[max(0, t - WINDOW) : t], x[t]) for t in range(len(x))]
    return sum(now and not before for before, now in pairwise([False, *above]))


def _jumped(past: np.ndarray, value: float) -> bool:
    if not math.isfinite(value):
        return True
    past = past[np.isfinite(past)]
    if len(past) < WINDOW // 2:
        return False
    median = float(np.median(past))
    deviation = 1.4826 * float(np.median(np.abs(past - median)))
    return bool(value > median + max(LEAST, DEVIATIONS * deviation))


def spike_score(values: Sequence[float]) -> float:
    """Return the share of values at least 7 rolling standard deviations from the mean.

    The mean and deviation are of the 1000 values before, as OLMo 2 defines it.

    >>> spike_score([0.0, 1.0] * 50 + [100.0])
    0.009900990099009901
    """
    x = np.asarray(values, dtype=float)
    if not len(x):
        return math.nan
    far = [_is_far(x[max(0, t - 1000) : t], x[t]) for t in range(len(x))]
    return sum(far) / len(x)


def _is_far(past: np.ndarray, value: float) -> bool:
    # Fewer than 20 values say nothing about their own spread.
    if len(past) < 20:
        return False
    return not bool(abs(value - past.mean()) < 7 * past.std())


def gradient_spikes(norms: Sequence[float], *, clip: float) -> int:
    """Return how many steps had ‖g‖ above 5 · clip, Emadi's reading of §7."""
    return sum(not norm <= 5 * clip for norm in norms)


Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """AdamW as in Emadi §7: β = (0.9, 0.95), weight decay 0.1 on matrices, clip 1."""

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
    def schedule(self) -> RateSchedule:
        return RateSchedule(
            peak=self.lr, steps=self.steps, warmup=self.warmup, floor=self.floor
        )

    @property
    def temperature(self) -> TemperatureWarmup:
        return TemperatureWarmup(start=self.tau_start, steps=self.tau_steps)


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
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
