"""Every inequality of theory 2 that is ours: 10⁵ random trials each, then climbs.

A climb changes a trial's parameters at random and keeps a change that brings the two
sides closer: 500 chains of 200 steps are 10⁵ further trials near the worst case.
"""

import sys
import time

import torch
from torch import Tensor

from benchmarks.table import publish
from tests.numerics.selection_trials import INEQUALITIES
from tests.numerics.selection_trials.inequality import Inequality

RANDOM, AT_ONCE = 100_000, 5_000
CHAINS, STEPS = 500, 200


def random_trials(inequality: Inequality) -> tuple[int, int]:
    """Return how many trials there were, and how many broke it."""
    trials, broken = 0, 0
    for seed in range(RANDOM // AT_ONCE):
        params = inequality.start(AT_ONCE, torch.Generator().manual_seed(seed))
        trials += len(params)
        broken += inequality.violations(params)
    return trials, broken


def tightness(inequality: Inequality, params: Tensor) -> Tensor:
    """Return small/large of each trial, its worst part if it has several.

    Rounding is added to the larger side: where both are 0 nothing is close.
    """
    small, large = inequality.sides(params)
    ratio = small / (large + inequality.rounding(params)).clamp_min(1e-300)
    ratio = ratio.reshape(-1, len(params)).amax(0)
    return ratio.masked_fill(~ratio.isfinite(), -1.0)


def climb(inequality: Inequality) -> tuple[int, int, float]:
    """Return trials, violations, and the closest the two sides came."""
    rng = torch.Generator().manual_seed(1)
    params = inequality.start(CHAINS, rng)
    best, broken = tightness(inequality, params), 0
    for step in range(STEPS):
        size = 10 ** -(3 * step / STEPS)
        noise = torch.randn(params.shape, generator=rng, dtype=torch.float64)
        moved = params + size * noise * params.abs().mean(-1, keepdim=True)
        broken += inequality.violations(moved)
        found = tightness(inequality, moved)
        params = torch.where((found > best)[:, None], moved, params)
        best = torch.maximum(found, best)
    return CHAINS * STEPS, broken, float(best.max())


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name, inequality in INEQUALITIES.items():
        start = time.process_time()
        trials, broken = random_trials(inequality)
        climbed, climbing, closest = climb(inequality)
        rows.append(
            {
                "inequality": name,
                "random trials": trials,
                "violated": broken,
                "climbing trials": climbed,
                "violated climbing": climbing,
                "closest small/large": closest,
                "CPU seconds": time.process_time() - start,
            }
        )
        print(name, rows[-1], file=sys.stderr, flush=True)
    publish("selection_bounds", rows)


if __name__ == "__main__":
    main()
