"""The certified answer against sort-and-cumsum, and against the softmax before it."""

import torch

from benchmarks.table import cpu_seconds, publish
from equipoise.numerics.rows.balance import balance, warm_up
from equipoise.numerics.rows.statistics import row_statistics

SCALES = (0.5, 2.0, 5.0)
HEADS, LENGTH = 20, 1024


def sorted_prefix(p_xK: torch.Tensor) -> torch.Tensor:
    """Return the paper's heuristic: the best 4 p(S)(1 - p(S)) over sorted prefixes."""
    mass = p_xK.sort(-1, descending=True).values.cumsum(-1)
    return (4 * mass * (1 - mass)).amax(-1)


def measured(scale: float) -> dict[str, object]:
    rng = torch.Generator().manual_seed(0)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    z = scale * torch.randn(HEADS, LENGTH, LENGTH, generator=rng)
    z = z.masked_fill(future, -torch.inf)
    p = z.softmax(-1)
    ours, paper, softmax, fused = cpu_seconds(
        lambda: balance(p),
        lambda: sorted_prefix(p),
        lambda: z.softmax(-1),
        lambda: row_statistics(z),
        repeats=5,
    )
    found = balance(p)
    return {
        "score scale": scale,
        "balance s": ours[0],
        "worst s": ours[1],
        "sort + cumsum s": paper[0],
        "softmax s": softmax[0],
        "row_statistics s": fused[0],
        "× sort + cumsum": paper[0] / ours[0],
        "× softmax": softmax[0] / ours[0],
        "open at 1e-6": float((found.upper - found.lower > 1e-6).double().mean()),
        "prefix wrong by > 1e-6": float(
            (found.lower - sorted_prefix(p) > 1e-6).double().mean()
        ),
    }


def main() -> None:
    warm_up()
    row_statistics(torch.zeros(1, 2))
    shape = f"{HEADS} × {LENGTH} × {LENGTH} causal float32, CPU seconds"
    publish("balance_speed", [measured(scale) for scale in SCALES], shape=shape)


if __name__ == "__main__":
    main()
