"""Tokens uniform on a sphere: moments and tails of a sum of two, in closed form.

With three chosen tokens each one's distance to the sum is the length of the sum of two
others, X² = a² + b² + 2ab·t, and (1+t)/2 has a Beta((d−1)/2, (d−1)/2) distribution.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from scipy import special
from torch import Tensor

from equipoise.numerics.selection import sphere_recall
from tests.numerics.selection.trials.inequality import Inequality, Rng, Sides

WIDTHS = (2, 3, 8, 64, 768)


def three_weights(count: int, rng: Rng) -> Tensor:
    """Return three weights and a radius, over four orders of magnitude."""
    u = torch.rand(count, 4, generator=rng, dtype=torch.float64)
    params = 10 ** (2 * u - 1.5)
    params[::4, 1] = params[::4, 0]
    params[1::4, :3] = params[1::4, :1]
    return params


def _pairs(params_NP: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two others of each of the three tokens, (N, 3) each."""
    w_N3 = params_NP[:, :3].abs() + 1e-9
    return w_N3.roll(1, -1), w_N3.roll(2, -1)


def _recall(width: int) -> Callable[[Tensor], Sides]:
    """Our bounds of E[N_s]/N against the exact probability that X ≤ r."""

    def sides(params_NP: Tensor) -> Sides:
        a, b = _pairs(params_NP)
        r_N = params_NP[:, 3].abs() + 1e-9
        at = ((r_N[:, None].square() - a.square() - b.square()) / (2 * a * b) + 1) / 2
        half = (width - 1) / 2
        exact = special.betainc(half, half, at.clamp(0, 1).numpy())
        true_N = torch.from_numpy(exact).mean(-1)
        found = sphere_recall(params_NP[:, :3].abs() + 1e-9, r_N, width=width)
        return torch.cat([found.lower, true_N]), torch.cat([true_N, found.upper])

    return sides


@lru_cache
def _nodes(width: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of the distribution of t; fewer where it is narrow."""
    power = (width - 3) / 2
    t, weight = special.roots_jacobi(400 if width < 100 else 60, power, power)
    return torch.from_numpy(t), torch.from_numpy(weight / np.sum(weight))


def _moments(width: int) -> Callable[[Tensor], Sides]:
    """σ/√(1+2/d) ≤ E X ≤ σ and Var X² ≤ 2σ⁴/d, by quadrature."""

    def sides(params_NP: Tensor) -> Sides:
        (a, b), (t, weight) = _pairs(params_NP), _nodes(width)
        a, b = a[:, 0], b[:, 0]
        square = (a**2 + b**2)[:, None] + 2 * (a * b)[:, None] * t
        mean = (square.clamp_min(0).sqrt() * weight).sum(-1)
        sigma = (a**2 + b**2).sqrt()
        spread = ((square - sigma[:, None] ** 2).square() * weight).sum(-1)
        least = sigma / (1 + 2 / width) ** 0.5
        small = torch.cat([least, mean, spread])
        return small, torch.cat([mean, sigma, 2 * sigma**4 / width])

    return sides


SPHERE: dict[str, Inequality] = {
    **{
        f"recall on a sphere, d = {d}": Inequality(three_weights, _recall(d))
        for d in WIDTHS
    },
    **{
        f"moments on a sphere, d = {d}": Inequality(
            three_weights, _moments(d), lambda params: 1e-6
        )
        for d in WIDTHS
    },
}
