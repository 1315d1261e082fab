"""Random and awkward attention heads for the fragility tests and benchmarks."""

from collections.abc import Callable, Iterator
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


ADVERSARIAL = (
    "sign values",
    "cancelling values",
    "midpoints",
    "blind rows",
    "near ties",
    "one sharp row",
    "repeated tokens",
    "common key",
)


def adversarial(count: int, seed: int) -> Iterator[Head]:
    """Yield heads made to hurt: each attacks one inequality of the bound.

    Sign values under uniform rows align every rounding of V; cancelling values leave
    ‖PV‖ small; midpoints put every entry half-way between numbers of the format; blind
    rows have q ⟂ K; near ties and a common key make large scores that nearly agree.
    """
    rng = torch.Generator().manual_seed(seed)
    for i in range(count):
        yield _attack(ADVERSARIAL[i % len(ADVERSARIAL)], rng)


def _attack(kind: str, rng: torch.Generator) -> Head:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    N, d = 8 << int(torch.randint(0, 3, (), generator=rng)), 16
    size = 2 ** (4 * torch.rand((), generator=rng).item() - 2)
    q, k, v, w = size * normal(N, d), normal(N, d), normal(N, d), normal(d, 32) / 4
    if kind == "sign values":
        v = (1 + 2.0**-5) * normal(N, d).sign() * size
        return Head(0 * q, k, v, torch.eye(d).double(), None, kind)
    if kind == "cancelling values":
        return Head(0.1 * q, k, v - v.mean(0) + 1e-2 * size, w, None, kind)
    if kind == "midpoints":
        # 17/16, 257/256, 2049/2048: half-way in e4m3 and e5m2, in bf16, in fp16.
        steps = torch.tensor([2.0**-4, 2.0**-3, 2.0**-8, 2.0**-11], dtype=torch.float64)
        pick = 1 + steps[torch.randint(0, 4, (N, d), generator=rng)]
        return Head(pick * q.sign(), pick * k.sign(), pick * v.sign(), w, None, kind)
    if kind == "repeated tokens":
        k, v = k[:2].repeat(N // 2, 1), v[:2].repeat(N // 2, 1)
        return Head(q, k, v, w, None, kind)
    q, k = _scores_attacked(kind, (q, k), normal, size)
    return Head(q, k, v, w, None, kind)


def _scores_attacked(
    kind: str, qk: tuple[Tensor, Tensor], normal: Callable[..., Tensor], size: float
) -> tuple[Tensor, Tensor]:
    q, k = qk
    N, d = q.shape
    if kind == "blind rows":
        k = k - (k @ q[0])[:, None] / q[0].square().sum() * q[0]
        return q[:1].expand(N, d) + 1e-3 * normal(N, d), k
    if kind == "near ties":
        return q, k[:1] * (1 + 2.0**-9 * normal(N, 1))
    if kind == "one sharp row":
        return torch.cat([12 * k[:1], 1e-3 * normal(N - 1, d)]), k
    return q, k + 3 * size * normal(1, d)  # a common key
