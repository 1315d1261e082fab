"""An inequality as two sides of random parameters.

Axes, in this package:  N trial · K key · D width · P parameters of one trial.
The true side is dense and obvious; the bounding side is what we ship. Tests take a few
hundred trials of each, ``benchmarks.selection_bounds`` 10⁵ and climbs to the worst.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

K, D = 7, 7
Rng = torch.Generator
Sides = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Inequality:
    """``sides`` returns (small, large), which must obey small ≤ large."""

    start: Callable[[int, Rng], Tensor]
    sides: Callable[[Tensor], Sides]
    rounding: Callable[[Tensor], Tensor | float] = lambda params: 1e-12

    def violations(self, params_NP: Tensor) -> int:
        """Return how many trials break it by more than rounding; NaN breaks it."""
        small, large = self.sides(params_NP)
        allowed = large + 1e-9 * large.abs() + self.rounding(params_NP)
        return int((~(small <= allowed)).sum())
