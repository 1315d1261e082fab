"""Slow, obvious versions of ``numerics.rows.balance``, and rows that defeat it.

``theta`` enumerates every subset in float64; ``infinity_to_one`` mentions none:
it differentiates ``torch.softmax`` and tries every vector of signs.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import jacrev, vmap

Rows = NDArray[np.float64]


def theta(p_NK: Rows) -> Rows:
    """Return the largest 4 p(S) p(Sᶜ) / (Σp)² over all subsets, for K ≤ 20 or so.

    Subset 0…01 is the mirror image of 1…10 in the list of sums, so that both sides
    are summed directly and a tiny one keeps its digits.
    """
    sums_Ns = np.zeros((len(p_NK), 1))
    for k in range(p_NK.shape[1]):
        sums_Ns = np.concatenate([sums_Ns, sums_Ns + p_NK[:, k : k + 1]], 1)
    half = max(1, sums_Ns.shape[1] // 2)
    products = sums_Ns[:, :half] * sums_Ns[:, ::-1][:, :half]
    return 4 * products.max(1) / p_NK.sum(1) ** 2


def infinity_to_one(z_NK: Tensor, temperature: float) -> Tensor:
    """Return ‖d softmax(z/τ) / dz‖ from ∞-norm to 1-norm: convex, so at a vertex."""
    J_NKK = vmap(jacrev(lambda z: torch.softmax(z / temperature, -1)))(z_NK.double())
    K = z_NK.shape[1]
    signs_Ks = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * K).view(-1, K).T
    norm_N: Tensor = (J_NKK @ signs_Ks.double()).abs().sum(1).amax(-1)
    return norm_N


def softmax(z_NK: Rows) -> Rows:
    e_NK = np.exp(z_NK - z_NK.max(1, keepdims=True))
    return normalised(e_NK)


def normalised(x_NK: Rows) -> Rows:
    rows: Rows = x_NK / x_NK.sum(1, keepdims=True)
    return rows


def _planted(rng: np.random.Generator, N: int, K: int) -> Rows:
    """Integers with an equal split, which no greedy step is likely to find."""
    x_NK = rng.integers(1, 2**20, (N, K)).astype(np.float64)
    left, right = x_NK[:, : K // 2].sum(1), x_NK[:, K // 2 :].sum(1)
    x_NK[:, 0] += np.maximum(right - left, 0)
    x_NK[:, -1] += np.maximum(left - right, 0)
    return rng.permuted(x_NK, axis=1)


def _top_k(rng: np.random.Generator, N: int, K: int) -> Rows:
    keep = rng.integers(1, K + 1, (N, 1))
    return rng.permuted((np.arange(K) < keep).astype(np.float64), axis=1)


def _around_half(rng: np.random.Generator, N: int, K: int) -> Rows:
    """One key holds ½ of the mass, give or take the last bits."""
    x_NK = rng.random((N, K)) + 0.01
    x_NK[:, 0] = x_NK[:, 1:].sum(1) * (1 + rng.integers(-3, 4, N) * 2.0**-52)
    return np.where(x_NK > 0, x_NK, 1.0)


def _few_and_slack(rng: np.random.Generator, N: int, K: int) -> Rows:
    """A few comparable keys, and a tail too light to balance them."""
    x_NK = 10.0 ** -rng.uniform(3, 8, (N, K))
    x_NK[:, : min(K, 5)] = rng.random((N, min(K, 5))) + 0.5
    return rng.permuted(x_NK, axis=1)


def _subnormal_tail(rng: np.random.Generator, N: int, K: int) -> Rows:
    x_NK = rng.random((N, K)) * 1e-310
    x_NK[:, : min(K, 3)] = rng.random((N, min(K, 3)))
    return x_NK


def _two_level(rng: np.random.Generator, N: int, K: int) -> Rows:
    return np.where(rng.random((N, K)) < 0.5, 1.0, rng.random((N, 1)) + 0.01)


def _scores(scale: float) -> Callable[[np.random.Generator, int, int], Rows]:
    return lambda rng, N, K: softmax(scale * rng.standard_normal((N, K)))


# name → draw(rng, N, K): non-negative numbers, normalised by ``rows``.
FAMILIES: dict[str, Callable[[np.random.Generator, int, int], Rows]] = {
    **{f"scores × {s:g}": _scores(s) for s in (0.0, 0.5, 1.0, 3.0, 10.0)},
    "Dirichlet": lambda rng, N, K: rng.dirichlet(np.full(K, 0.3), N) + 1e-300,
    "top-k uniform": _top_k,
    "near ties": lambda rng, N, K: 1 + 1e-9 * rng.standard_normal((N, K)),
    "last-bit ties": lambda rng, N, K: 1 + 2.0**-52 * rng.integers(-2, 3, (N, K)),
    "two-level": _two_level,
    "powers of two": lambda rng, N, K: np.tile(0.5 ** np.arange(K), (N, 1)),
    "geometric": lambda rng, N, K: rng.uniform(0.3, 1, (N, 1)) ** np.arange(K),
    "planted": _planted,
    "around half": _around_half,
    "few and slack": _few_and_slack,
    "subnormal tail": _subnormal_tail,
    "small integers": lambda rng, N, K: rng.integers(1, 10, (N, K)).astype(np.float64),
}

# Rows on which one step of the ladder is known to fail.
DEFEATS = {
    "sorted prefix": [4.0, 1, 4, 1],
    "largest first": [3.0, 3, 2, 2, 2],
    "differencing": [8.0, 7, 6, 5, 4],
    "one swap": [14.0, 13, 12, 11, 10, 9, 9],
}


def rows(family: str, rng: np.random.Generator, shape: tuple[int, int]) -> Rows:
    """Return rows of one family, on the simplex."""
    return normalised(FAMILIES[family](rng, *shape))
