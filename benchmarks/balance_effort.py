"""CPU time of structured rows beside an ordinary row of the same length and dtype."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.table import publish
from equipoise.numerics.rows.balance import balance

ENTRIES = 60_000
Family = Callable[[int, int, torch.Generator], Tensor]


def normal(rows: int, keys: int, rng: torch.Generator) -> Tensor:
    return torch.randn(rows, keys, generator=rng, dtype=torch.float64)


def uniform(rows: int, keys: int, rng: torch.Generator) -> Tensor:
    return torch.rand(rows, keys, generator=rng, dtype=torch.float64)


def peaks(*heights: float) -> Family:
    """A few larger keys over a nearly uniform rest."""

    def draw(rows: int, keys: int, rng: torch.Generator) -> Tensor:
        z = 0.01 * normal(rows, keys, rng)
        z[:, : len(heights)] += torch.tensor(heights, dtype=z.dtype)
        return z.exp()

    return draw


def few_and_slack(rows: int, keys: int, rng: torch.Generator) -> Tensor:
    x = 10 ** -(3 + 5 * uniform(rows, keys, rng))
    x[:, :5] = uniform(rows, 5, rng) + 0.5
    return x


def below_half(rows: int, keys: int, rng: torch.Generator) -> Tensor:
    x = uniform(rows, keys, rng) + 0.01
    x[:, 0] = 0.999 * x[:, 1:].sum(-1)
    return x


def few_keys(rows: int, keys: int, rng: torch.Generator) -> Tensor:
    x = (0.3 * normal(rows, keys, rng)).exp()
    x[:, 27:] = 0
    return x


def two_level(rows: int, keys: int, rng: torch.Generator) -> Tensor:
    low = uniform(rows, 1, rng) + 0.01
    return torch.where(uniform(rows, keys, rng) < 0.5, 1.0, low)


def twice(scale: float) -> Family:
    return lambda n, k, rng: (scale * normal(n, k, rng)).softmax(-1).softmax(-1)


def integers(most: int) -> Family:
    return lambda n, k, rng: torch.randint(1, most, (n, k), generator=rng).double()


FAMILIES: dict[str, Family] = {
    "ordinary": lambda n, k, rng: normal(n, k, rng).exp(),
    "cold": lambda n, k, rng: (5 * normal(n, k, rng)).softmax(-1),
    "nearly uniform": lambda n, k, rng: (1e-3 * normal(n, k, rng)).exp(),
    "near ties": lambda n, k, rng: 1 + 1e-9 * normal(n, k, rng),
    "one larger key": peaks(3.0),
    "three larger keys": peaks(4.0, 3.0, 2.0),
    "softmax of softmax": twice(1.0),
    "softmax of cold softmax": twice(5.0),
    "bfloat16": lambda n, k, rng: normal(n, k, rng).softmax(-1).bfloat16().double(),
    "small integers": integers(10),
    "integers": integers(2**20),
    "geometric": lambda n, k, rng: 0.97 ** torch.arange(k).double().expand(n, k),
    "powers of two": lambda n, k, rng: 0.5 ** torch.arange(k).double().expand(n, k),
    "just below half": below_half,
    "few and slack": few_and_slack,
    "two-level": two_level,
    "27 keys": few_keys,
    "1, 2, 3, …": lambda n, k, rng: torch.arange(1, k + 1).double().expand(n, k),
}


def seconds(p: Tensor) -> float:
    balance(p[:2])
    begin = time.process_time()
    balance(p)
    return (time.process_time() - begin) / len(p)


def measured(dtype: torch.dtype, keys: int) -> dict[str, object]:
    rng = torch.Generator().manual_seed(keys)
    spent = {}
    for name, family in FAMILIES.items():
        x = family(max(64, ENTRIES // keys), keys, rng)
        p = (x / x.sum(-1, keepdim=True)).to(dtype).contiguous()
        spent[name] = min(seconds(p) for _ in range(3))
    ordinary = spent["ordinary"]
    worst = max(spent, key=lambda name: spent[name])
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "keys": keys,
        "ordinary µs": 1e6 * ordinary,
        "slowest family": worst,
        "× ordinary": spent[worst] / ordinary,
    }


def main() -> None:
    cases = [(d, k) for d in (torch.float32, torch.float64) for k in (64, 257, 1024)]
    publish("balance_effort", [measured(*case) for case in cases], bar="20 × ordinary")


if __name__ == "__main__":
    main()
