"""Random and awkward attention heads for the fragility tests and benchmarks."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("plain", "key offset", "value offset", "sharp", "causal", "wide values")


@dataclass(frozen=True, slots=True)
class Head:
    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    visible: Tensor | None
    kind: str

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.w


def heads(count: int, seed: int) -> Iterator[Head]:
    """Yield heads of 8-128 tokens, widths 16-64, score scales 0.35-2.3, six kinds."""
    rng = torch.Generator().manual_seed(seed)
    for i in range(count):
        yield _head(KINDS[i % len(KINDS)], rng)


def _head(kind: str, rng: torch.Generator) -> Head:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    N = int(torch.randint(8, 129, (), generator=rng))
    d = 16 << int(torch.randint(0, 3, (), generator=rng))
    D = 64 << int(torch.randint(0, 3, (), generator=rng))
    t = 2 ** (2.7 * torch.rand((), generator=rng).item() - 1.5)
    q, k, v, w = t * normal(N, d), t * normal(N, d), normal(N, d), normal(d, D) / d**0.5
    if kind == "key offset":
        k = k + 2 * normal(1, d)
    elif kind == "value offset":
        v = v + 3 * normal(1, d)
    elif kind == "sharp":
        q = 3 * q
    elif kind == "wide values":
        v = v * normal(1, d).exp()
    visible = torch.ones(N, N, dtype=torch.bool).tril() if kind == "causal" else None
    return Head(q, k, v, w, visible, kind)
