"""The paper's Algorithm 3 on a model of its shape: all heads, all queries, L = 1024.

Random weights; the time does not depend on them. Beside it, on a sample of queries of
the same heads, the definition written out: once with one numpy expression per query,
once with a loop over tokens. The paper reports 17 h 4 min, in parallel jobs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GPT2Config, GPT2Model

from benchmarks.table import publish
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.numerics.selection import (
    HeadMetricOptions,
    critical_top,
    selection_of_blocks,
)
from equipoise.probes.capture import Boundary, Collector, attached
from equipoise.probes.protocols import Emit

L, SAMPLE = 1024, 4
SIZES = (1, 2, 5, 10, 20, 40, 60, 80, 100)
Array = NDArray[np.float64]


@dataclass(slots=True)
class Algorithm3:
    """Per head the mean d̃ and both ends of E[d̃], for every size."""

    name: str = "algorithm 3"
    seconds: float = 0.0
    tables: list[dict[str, Tensor]] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        assert call.v_BGKD is not None
        start = time.process_time()
        wanted = HeadMetricOptions(tops=SIZES, separability=False)
        found = selection_of_blocks(call.blocks(), call.v_BGKD, wanted=wanted)
        self.tables.append(found.per_head())
        self.seconds += time.process_time() - start
        self.calls.append(call)


def measured() -> Algorithm3:
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config()).eval()
    tokens = torch.randint(0, 50257, (1, L))
    probe = Algorithm3()

    boundary = Boundary(strict=True)
    with attached([probe], anatomy_of(model), Collector(), boundary=boundary):
        with torch.no_grad():
            model(tokens)
    return probe


def by_expression(w: Array, x: Array, N: int) -> tuple[float, float]:
    """Return d̃ and the main term of E[d̃] of one query, whole arrays at a time."""
    y, n = w[:, None] * x, len(w)
    order = np.argsort(-w, kind="stable")
    s = y[order[:N]].sum(0)
    others = y.sum(0) - y
    mean = np.linalg.norm(y - N / (n - 1) * others, axis=1).sum()
    true = np.linalg.norm(s - y[order[N:]], axis=1).sum()
    return float(true), float((n - N) / n * mean)


def by_token(w: Array, x: Array, N: int) -> tuple[float, float]:
    """Return the same, token by token as the definition reads."""
    n, order = len(w), sorted(range(len(w)), key=lambda i: -w[i])
    inside = set(order[:N])
    s = sum(w[i] * x[i] for i in inside)
    true = sum(np.linalg.norm(s - w[i] * x[i]) for i in range(n) if i not in inside)
    mean = 0.0
    for i in range(n):
        others = sum(w[j] * x[j] for j in range(n) if j != i)
        mean += np.linalg.norm(w[i] * x[i] - N / (n - 1) * others)
    return float(true), (n - N) / n * float(mean)


def sampled(call: AttentionCall, head: int, query: int) -> tuple[Array, Array]:
    z_K = call.scores(slice(query, query + 1))[0, head, 0].double()
    assert call.v_BGKD is not None
    x_KD = call.v_BGKD[0, head, : len(z_K)].double()
    return z_K.softmax(-1).numpy(), x_KD.numpy()


def direct_seconds(
    probe: Algorithm3, rule: Callable[..., tuple[float, float]], sizes: tuple[int, ...]
) -> float:
    """Return CPU seconds per query and size, over a sample of heads and queries."""
    rng, spent, done = np.random.default_rng(0), 0.0, 0
    for _ in range(SAMPLE):
        call = probe.calls[rng.integers(12)]
        row = sampled(call, int(rng.integers(12)), int(rng.integers(200, L)))
        for N in sizes:
            start = time.process_time()
            rule(*row, N)
            spent += time.process_time() - start
            done += 1
    return spent / done


def agreement(probe: Algorithm3) -> float:
    """Return the largest relative difference to the expression, over a few rows."""
    rng, worst = np.random.default_rng(1), 0.0
    for _ in range(8):
        layer, head, query = (
            int(rng.integers(a, b)) for a, b in ((0, 12), (0, 12), (200, L))
        )
        call = probe.calls[layer]
        assert call.v_BGKD is not None
        block = [(slice(query, query + 1), call.scores(slice(query, query + 1)))]
        found = selection_of_blocks(
            block, call.v_BGKD, wanted=HeadMetricOptions(tops=SIZES)
        ).at
        assert found.distance is not None
        for t, N in enumerate(SIZES):
            true, mean = by_expression(*sampled(call, head, query), N)
            at = (0, head, 0, t)
            worst = max(worst, abs(found.distance.value[at].item() / true - 1))
            worst = max(worst, abs(found.distance.expected_lower[at].item() / mean - 1))
    return worst


def main() -> None:
    torch.set_num_threads(1)
    probe = measured()
    queries = 144 * sum(L - N for N in SIZES)  # queries that see more than N keys
    ours = probe.seconds / queries
    rows = []
    for name, rule, sizes in (
        ("numpy, an expression per query", by_expression, SIZES),
        ("as the definition reads", by_token, (5,)),
    ):
        each = direct_seconds(probe, rule, sizes)
        rows.append(
            {
                "direct implementation": name,
                "its seconds per query and size": each,
                "ours": ours,
                "ratio": each / ours,
                "hours for all": each * queries / 3600,
            }
        )
    true_TM, low_TM, high_TM = (
        torch.cat([t[name] for t in probe.tables]).T
        for name in ("distance", "distance.expected_lower", "distance.expected_upper")
    )
    critical = {
        end: critical_top(
            true_TM, chance, list(SIZES), generator=torch.Generator().manual_seed(0)
        )
        for end, chance in (("lower", low_TM), ("upper", high_TM))
    }
    publish(
        "selection_algorithm3",
        rows,
        cpu_seconds=probe.seconds,
        heads=144,
        length=L,
        sizes=list(SIZES),
        agreement=agreement(probe),
        critical={end: found.top for end, found in critical.items()},
        detectable_shift=critical["upper"].detectable,
    )
    print(
        f"all heads, all queries, {len(SIZES)} sizes: {probe.seconds:.0f} CPU seconds"
    )


if __name__ == "__main__":
    main()
