"""What the step alone decides: the learning rate."""

import math
from dataclasses import dataclass

from equipoise.lab.options import require


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up, then half a cosine down to ``floor`` · peak.

    >>> schedule = Schedule(peak=1.0, steps=10, warmup=4, floor=0.1)
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
