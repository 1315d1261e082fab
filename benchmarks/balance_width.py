"""How wide the interval is on attention-like rows: 64 to 8192 keys, float32."""

import torch
from torch import Tensor

from benchmarks.table import publish
from equipoise.numerics.rows.balance import balance

ENTRIES = 1 << 21


def gaussian(rows: int, keys: int, rng: torch.Generator) -> Tensor:
    """Scores of every temperature from nearly uniform to nearly one-hot."""
    scale = 10 ** torch.empty(rows, 1).uniform_(-2, 1, generator=rng)
    return scale * torch.randn(rows, keys, generator=rng)


def projected(rows: int, keys: int, rng: torch.Generator) -> Tensor:
    """Queries and keys with a few strong common directions, as trained heads have."""
    strength = torch.logspace(1, -1, 64)
    q = torch.randn(rows, 64, generator=rng) * strength
    k = torch.randn(keys, 64, generator=rng) * strength
    return q @ k.T / 8


def sinks(rows: int, keys: int, rng: torch.Generator) -> Tensor:
    """A first token that draws between 1 % and 99 % of the mass."""
    z = gaussian(rows, keys, rng).clamp(-8, 8)
    share = torch.empty(rows).uniform_(0.01, 0.99, generator=rng)
    z[:, 0] = z[:, 1:].logsumexp(-1) + (share / (1 - share)).log()
    return z


def recency(rows: int, keys: int, rng: torch.Generator) -> Tensor:
    """Linear biases towards recent keys (ALiBi)."""
    slope = 2.0 ** -torch.empty(rows, 1).uniform_(1, 8, generator=rng)
    return torch.randn(rows, keys, generator=rng) - slope * torch.arange(keys)


def halved(rows: int, keys: int, rng: torch.Generator) -> Tensor:
    """Scores computed in bfloat16: many exact ties."""
    return gaussian(rows, keys, rng).bfloat16().float()


KINDS = (gaussian, projected, sinks, recency, halved)


def measured(make: object, keys: int) -> dict[str, object]:
    rng = torch.Generator().manual_seed(keys)
    p = make(ENTRIES // keys, keys, rng).softmax(-1)
    found = balance(p)
    width = (found.upper - found.lower).double()
    return {
        "rows like": make.__name__,
        "keys": keys,
        "rows": len(p),
        "within 1e-6": float((width <= 1e-6).double().mean()),
        "exact": float(found.exact.double().mean()),
        "widest": float(width.max()),
        "median θ": float(found.lower.median()),
    }


def main() -> None:
    lengths = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    rows = [measured(make, keys) for make in KINDS for keys in lengths]
    publish("balance_width", rows, worst=min(row["within 1e-6"] for row in rows))


if __name__ == "__main__":
    main()
