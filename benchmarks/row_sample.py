"""A sample of rows: how often its 95 % intervals hold, and its cost at L = 8192."""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.table import publish
from equipoise.anatomy.calls import AttentionCall
from equipoise.numerics.rows.statistics import row_statistics
from equipoise.probes.attention import QUANTILES, AttentionRows
from equipoise.probes.row_sample import (
    chosen_queries,
    query_weights,
    sampling_errors,
    weighted_mean,
    weighted_quantiles,
)

QUERIES, ROWS, STEPS, SITES = 2048, 512, 500, 4
LEVELS = {name: QUANTILES[name] for name in ("p5", "p50")}
WEIGHTS = query_weights(QUERIES, ROWS)
LENGTH, HEADS, WIDTH, REPEATS = 8192, 2, 64, 3


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def projected(strength: float) -> Tensor:
    """θ of causal rows from random queries and keys, two heads of two sequences."""
    q, k = noise(2, 2, QUERIES, 16), noise(2, 2, QUERIES, 17)[..., :16]
    read = row_statistics(strength * (q @ k.mT), causal_from=0)
    return read.theta_lower.where(read.counted, torch.nan).transpose(0, 1)


def drifting() -> Tensor:
    """θ that falls along the sequence, with noise that its neighbours share."""
    own, shared = noise(2, 2, QUERIES), noise(2, 2, QUERIES // 64)
    place = torch.linspace(2, -2, QUERIES)
    return (place + 0.5 * own + 0.5 * shared.repeat_interleave(64, -1)).sigmoid()


POPULATIONS: dict[str, Callable[[], Tensor]] = {
    "rows of random scores, scale 1": lambda: projected(0.25),
    "rows of random scores, scale 4": lambda: projected(1.0),
    "a drift along the sequence": drifting,
}


def _readings(theta_HBn: Tensor, weight_n: Tensor) -> dict[str, Tensor]:
    flat_HN, weight_N = theta_HBn.flatten(1), weight_n.repeat(theta_HBn.shape[1])
    found = weighted_quantiles(flat_HN, weight_N, list(LEVELS.values()))
    mean = weighted_mean(flat_HN, weight_N)
    return {"mean": mean, **dict(zip(LEVELS, found, strict=True))}


def coverage(name: str) -> dict[str, object]:
    """Return the share of intervals that hold what all rows give."""
    theta_HBQ = POPULATIONS[name]()
    truth, weight_n = _readings(theta_HBQ, torch.ones(QUERIES)), WEIGHTS
    held: dict[str, list[Tensor]] = {reading: [] for reading in truth}
    off: list[Tensor] = []
    for step in range(STEPS):
        for site in range(SITES):
            chosen = chosen_queries(QUERIES, ROWS, step=step, site=str(site))
            read = theta_HBQ[:, :, chosen]
            error = sampling_errors(read, weight_n, at=LEVELS)
            found = _readings(read, weight_n)
            for reading, value in found.items():
                inside = (value - truth[reading]).abs() <= error[reading]
                held[reading].append(inside.float())
            off.append(found["mean"] - truth["mean"])
    shares = {key: float(torch.stack(all_).mean()) for key, all_ in held.items()}
    rms = float(torch.stack(off).square().mean().sqrt())
    return {"θ": name, "intervals": 2 * STEPS * SITES, **shares, "mean off by": rms}


def _seconds(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def cost() -> dict[str, object]:
    """Return CPU seconds of a call's readings beside its own forward pass."""
    q, k = noise(1, HEADS, LENGTH, WIDTH), noise(1, HEADS, LENGTH, WIDTH + 1)[..., :-1]
    call = AttentionCall(
        module=None, kind="sdpa", q_BHQD=q, k_BGKD=k, causal=True, scale=WIDTH**-0.5
    )
    runs: dict[str, Callable[[], object]] = {
        "forward s": lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True)
    }
    for rows in (ROWS, "all"):
        probe = AttentionRows(rows=rows)  # type: ignore[arg-type]
        runs[f"rows={rows} s"] = lambda probe=probe: probe.on_attention(  # type: ignore[misc]
            "site", call, lambda *_, **__: None
        )
    for run in runs.values():
        run()
    rounds = [
        {name: _seconds(run) for name, run in runs.items()} for _ in range(REPEATS)
    ]
    least = {name: min(row[name] for row in rounds) for name in runs}
    ratio = {f"× {name[:-2]}": s / least["forward s"] for name, s in least.items()}
    return {"keys": LENGTH, **least, **ratio}


def main() -> None:
    shares = [coverage(name) for name in POPULATIONS]
    publish("row_sample", shares, read=f"{ROWS} of {QUERIES}", bar="93 to 97 %")
    publish("row_sample_cost", [cost()], bar="0.5 × the forward pass")


if __name__ == "__main__":
    main()
