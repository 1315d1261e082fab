"""Rows of weights and their tokens, ordinary and nasty, by the thousand and seeded.

Axes, in this file:  N row · K key · D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Rng = torch.Generator
Made = Callable[[int, int, Rng], Tensor]


def normal(*shape: int, rng: Rng) -> Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def _softmax(scale: float) -> Made:
    return lambda N, K, rng: (scale * normal(N, K, rng=rng)).softmax(-1)


def _two_levels(N: int, K: int, rng: Rng) -> Tensor:
    high = torch.rand(N, K, generator=rng) < torch.rand(N, 1, generator=rng)
    ratio = 1 + 9 * torch.rand(N, 1, generator=rng, dtype=torch.float64)
    w = torch.where(high, ratio, torch.ones_like(ratio))
    return w / w.sum(-1, keepdim=True)


def _sparse(N: int, K: int, rng: Rng) -> Tensor:
    w = normal(N, K, rng=rng).relu() + 1e-3 * torch.eye(K, dtype=torch.float64)[0]
    return w / w.sum(-1, keepdim=True)


def _sink(N: int, K: int, rng: Rng) -> Tensor:
    z = normal(N, K, rng=rng)
    z[:, 0] += 6
    return z.softmax(-1)


WEIGHTS: dict[str, Made] = {
    "flat": lambda N, K, rng: torch.full((N, K), 1 / K, dtype=torch.float64),
    "nearly flat": _softmax(1e-3),
    "soft": _softmax(1.0),
    "sharp": _softmax(5.0),
    "one key": _softmax(50.0),
    "two levels": _two_levels,
    "sparse": _sparse,
    "sink": _sink,
}


def _sphere(N: int, K: int, D: int, rng: Rng) -> Tensor:
    return torch.nn.functional.normalize(normal(N, K, D, rng=rng), dim=-1)


def _collinear(N: int, K: int, D: int, rng: Rng) -> Tensor:
    return normal(N, K, 1, rng=rng) * _sphere(N, 1, D, rng)


def _outlier(N: int, K: int, D: int, rng: Rng) -> Tensor:
    x = normal(N, K, D, rng=rng)
    x[:, K // 2] *= 1e3
    return x


TOKENS: dict[str, Callable[[int, int, int, Rng], Tensor]] = {
    "normal": lambda N, K, D, rng: normal(N, K, D, rng=rng),
    "sphere": _sphere,
    "orthonormal": lambda N, K, D, rng: (
        torch.eye(max(K, D)).double()[:K].repeat(N, 1, 1)
    ),
    "identical": lambda N, K, D, rng: _sphere(N, 1, D, rng).expand(N, K, D),
    "common mean": lambda N, K, D, rng: 5 + normal(N, K, D, rng=rng),
    "collinear": _collinear,
    "antipodal": lambda N, K, D, rng: (
        _sphere(N, 1, D, rng) * normal(N, K, 1, rng=rng).sign()
    ),
    "outlier": _outlier,
}


def specimens(count: int, *, seed: int, K: int, D: int) -> tuple[Tensor, Tensor]:
    """Return weights (N, 1, K) and tokens (N, K, D'): every kind with every other."""
    rng = Rng().manual_seed(seed)
    each = -(-count // (len(WEIGHTS) * len(TOKENS)))
    w, x = [], []
    for weigh in WEIGHTS.values():
        for make in TOKENS.values():
            w.append(weigh(each, K, rng))
            tokens = make(each, K, D, rng)
            wide = max(K, D) - tokens.shape[-1]
            x.append(torch.nn.functional.pad(tokens, (0, wide)))
    return torch.cat(w)[:, None, :], torch.cat(x)
