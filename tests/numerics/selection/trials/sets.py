"""Sets of tokens: d̃ between its bounds, and its mean over every set."""

from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor

from equipoise.numerics.selection import (
    SelectedTokens,
    chosen,
    distance_of,
    published_bound,
    ranked_at_random,
    weighted_tokens,
)
from tests.numerics.selection.specimens import specimens
from tests.numerics.selection.trials.inequality import D, Inequality, K, Rng, Sides


def token_rows(count: int, rng: Rng) -> Tensor:
    w, x = specimens(count, seed=int(torch.randint(2**31, (), generator=rng)), K=K, D=D)
    return torch.cat([w[:, 0], x.flatten(1)], -1)[:count]


def _row(params_NP: Tensor) -> tuple[Tensor, Tensor]:
    w_NK = params_NP[:, :K].abs()
    w_NK = w_NK / w_NK.sum(-1, keepdim=True)
    return w_NK[:, None, :], params_NP[:, K:].reshape(-1, K, D)


def _rounding(params_NP: Tensor) -> Tensor:
    """Distances are roots of differences: right to a few √ε of the lengths involved."""
    w_N1K, x_NKD = _row(params_NP)
    return 1e-6 * (w_N1K[:, 0] * x_NKD.norm(dim=-1)).sum(-1)


def dense_distance(w_N1K: Tensor, x_NKD: Tensor, inside_NK: Tensor) -> Tensor:
    """Return Σ_{i∉I} ‖s − w_i x_i‖ from the vectors themselves."""
    y_NKD = w_N1K[:, 0, :, None] * x_NKD
    s_N1D = (y_NKD * inside_NK[..., None]).sum(1, keepdim=True)
    return ((s_N1D - y_NKD).norm(dim=-1) * ~inside_NK).sum(-1)


def _of_set(
    bound: Callable[..., Tensor],
    top: int,
    *,
    below: bool = False,
    shuffled: bool = False,
) -> Callable[[Tensor], Sides]:
    def sides(params_NP: Tensor) -> Sides:
        given = weighted_tokens(*_row(params_NP))
        if shuffled:
            given = ranked_at_random(given, Rng().manual_seed(len(params_NP)))
        picked = chosen(given, top)
        true_N = dense_distance(*_row(params_NP), picked.inside_xQK[:, 0])
        bound_N = bound(picked)[:, 0]
        return (bound_N, true_N) if below else (true_N, bound_N)

    return sides


def _expectation(top: int, side: str) -> Callable[[Tensor], Sides]:
    def sides(params_NP: Tensor) -> Sides:
        w, x = _row(params_NP)
        sets = list(combinations(range(K), top))
        true_N = torch.zeros(len(w), dtype=torch.float64)
        for inside in sets:
            mask = torch.zeros(len(w), K, dtype=torch.bool)
            mask[:, list(inside)] = True
            true_N += dense_distance(w, x, mask) / len(sets)
        found = distance_of(chosen(weighted_tokens(w, x), top))
        if side == "lower":
            return found.expected_lower[:, 0], true_N
        if side == "upper":
            return true_N, found.expected_upper[:, 0]
        return true_N - found.expected_lower[:, 0], _jensen_gap(w, x, top)

    return sides


def _jensen_gap(w_N1K: Tensor, x_NKD: Tensor, top: int) -> Tensor:
    """Return ((L−N)/L)Σ min(√V_i, V_i/2m_i) from the vectors themselves."""
    y_NKD = w_N1K[:, 0, :, None] * x_NKD
    total_N = torch.zeros(len(w_N1K), dtype=torch.float64)
    for i in range(K):
        others = torch.cat([y_NKD[:, :i], y_NKD[:, i + 1 :]], 1)
        mean_ND = others.mean(1)
        m_N = (y_NKD[:, i] - top * mean_ND).norm(dim=-1)
        spread_N = (others - mean_ND[:, None]).square().sum((1, 2)) / (K - 1)
        V_N = top * (K - 1 - top) / (K - 2) * spread_N
        total_N += torch.minimum(V_N.sqrt(), V_N / (2 * m_N.clamp_min(1e-300)))
    return (K - top) / K * total_N


def _upper(picked: SelectedTokens) -> Tensor:
    return distance_of(picked).upper


def _lower(picked: SelectedTokens) -> Tensor:
    return distance_of(picked).lower


SETS: dict[str, Inequality] = {
    **{
        f"d̃ ≤ {what}, N = {N}{how}": Inequality(
            token_rows, _of_set(bound, N, shuffled=bool(how)), _rounding
        )
        for what, bound in (("refined", _upper), ("Theorem 1", published_bound))
        for N in (1, 3, 6)
        for how in ("", ", any set")
    },
    **{
        f"d̃ ≥ lower, N = {N}{how}": Inequality(
            token_rows, _of_set(_lower, N, below=True, shuffled=bool(how)), _rounding
        )
        for N in (1, 3, 6)
        for how in ("", ", any set")
    },
    **{
        f"E[d̃] {side}, N = {N}": Inequality(
            token_rows, _expectation(N, side), _rounding
        )
        for side in ("lower", "upper", "Jensen gap")
        for N in (1, 3, 6)
    },
}
