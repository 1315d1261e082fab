"""θ against every subset: 10⁵ rows in float64, up to 20 keys, all families."""

import numpy as np
import torch

from benchmarks.table import publish
from equipoise.numerics.rows.balance import balance
from tests.oracles import balance as oracle

# keys → rows per family; enumerating 2²⁰ subsets is why long rows are fewer.
ROWS = {1: 50, 2: 500, 3: 700, 4: 700, 6: 900, 8: 1000, 10: 1100, 12: 720, 15: 180}
ROWS |= {18: 24, 20: 10}
COUNTS = ("rows", "exact", "outside", "bad witness")
BATCH = 1 << 22


def truth(p_NK: np.ndarray) -> np.ndarray:
    """Return the oracle's answer a few rows at a time."""
    few = max(1, BATCH >> p_NK.shape[1])
    parts = [oracle.theta(p_NK[i : i + few]) for i in range(0, len(p_NK), few)]
    return np.concatenate(parts)


def measured(family: str) -> dict[str, object]:
    rng = np.random.default_rng(sorted(oracle.FAMILIES).index(family))
    row = {"family": family, **dict.fromkeys(COUNTS, 0)}
    worst, relative = 0.0, 0.0
    for keys, count in ROWS.items():
        p = oracle.rows(family, rng, (count, keys))
        found, true = balance(torch.from_numpy(p), witness=True), truth(p)
        low, high = found.lower.numpy(), found.upper.numpy()
        mask = found.witness.numpy()
        inside, outside = (p * mask).sum(1), (p * ~mask).sum(1)
        reached = 4 * inside * outside / (inside + outside) ** 2
        error = np.maximum(abs(low - true), abs(high - true))
        row["rows"] += count
        row["exact"] += int(found.exact.sum())
        # The oracle rounds too: 2⁻⁴⁸ is 16 units of its last place.
        slack = 2.0**-48 * true
        row["outside"] += int(((low > true + slack) | (high < true - slack)).sum())
        row["bad witness"] += int((abs(reached - low) > slack).sum())
        worst = max(worst, error.max())
        relative = max(relative, (error[true > 0] / true[true > 0]).max(initial=0.0))
    return {**row, "worst error": worst, "worst relative": relative}


def main() -> None:
    rows = [measured(family) for family in oracle.FAMILIES]
    total = {k: sum(row[k] for row in rows) for k in COUNTS}
    worst = {k: max(row[k] for row in rows) for k in ("worst error", "worst relative")}
    publish("balance_truth", [*rows, {"family": "all", **total, **worst}])


if __name__ == "__main__":
    main()
