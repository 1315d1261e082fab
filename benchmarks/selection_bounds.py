"""Every inequality of theory 2 that is ours: 10⁵ random trials each, then climbs.

A climb changes a trial's parameters at random and keeps a change that brings the two
sides closer: 500 chains of 200 steps are 10⁵ further trials near the worst case.
"""

import json
import sys
import time

import torch
from torch import Tensor

from benchmarks.table import RESULTS, publish
from tests.numerics.selection.trials import INEQUALITIES
from tests.numerics.selection.trials.inequality import Inequality

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


def row(name: str) -> dict[str, object]:
    start, inequality = time.process_time(), INEQUALITIES[name]
    trials, broken = random_trials(inequality)
    climbed, climbing, closest = climb(inequality)
    return {
        "inequality": name,
        "random trials": trials,
        "violated": broken,
        "climbing trials": climbed,
        "violated climbing": climbing,
        "closest small/large": closest,
        "CPU seconds": time.process_time() - start,
    }


def main() -> None:
    """Try all, or those named on the command line; the others keep their rows."""
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or list(INEQUALITIES)
    kept = RESULTS / "selection_bounds.json"
    known = json.loads(kept.read_text())["rows"] if kept.exists() else []
    rows = {found["inequality"]: found for found in known}
    for name in wanted:
        rows[name] = row(name)
        print(rows[name], file=sys.stderr, flush=True)
    publish("selection_bounds", [rows[name] for name in INEQUALITIES if name in rows])


if __name__ == "__main__":
    main()
